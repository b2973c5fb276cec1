"""Rows and batches: reading the users' data formats, passing them to models, and dealing rows to voters."""
