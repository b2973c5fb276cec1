"""Rows and batches in the forms that users have them in, as arguments of a call, and how they are dealt to voters."""
