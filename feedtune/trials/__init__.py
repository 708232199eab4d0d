"""Trials inside a live run: the control server, the session of one training, and the order of blocks."""
