"""Wrapped models on disk: states, files, and folders of pretrained models."""
