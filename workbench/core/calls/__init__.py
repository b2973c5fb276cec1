"""Calls of a wrapped object: what is asked of it, and how branches become a prediction and its risks."""
