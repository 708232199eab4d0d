"""feedtune: find out why GPUs starve for data, and prove what cures it."""

__version__ = "0.1.0"
