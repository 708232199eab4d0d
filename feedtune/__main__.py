"""``python -m feedtune``."""

from feedtune.cli import main

main()
