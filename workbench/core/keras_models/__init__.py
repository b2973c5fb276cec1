"""Wrapped Keras models: the torch backend of Keras 3, its own way of calling, training and saving."""

from __future__ import annotations

from .wrapping import check_backend, wrap, wrap_function

__all__ = ["check_backend", "wrap", "wrap_function"]
