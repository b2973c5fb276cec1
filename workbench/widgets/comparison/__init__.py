"""`Comparison`: wrappers side by side on one model."""
