"""Readers that stand beside the training, in another process."""
