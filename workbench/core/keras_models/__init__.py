"""Wrapped Keras models: the torch backend of Keras 3, its own way of calling, training and saving."""

from __future__ import annotations

from . import archive  # which tells Keras how to read the files
from .model import WrappedKeras, model_of
from .wrapping import check_backend, wrap, wrap_function

__all__ = ["WrappedKeras", "archive", "check_backend", "model_of", "wrap", "wrap_function"]
