"""`Comparison`: compare wrappers of one model."""
