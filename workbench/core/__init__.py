"""Wrapped objects: how wrappers attach methods to a model, and how the result predicts, copies, saves and loads.

Nothing here depends on a particular method.
"""
