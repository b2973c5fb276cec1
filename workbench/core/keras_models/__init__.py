"""Wrapped Keras 3 models on the torch backend, with the calling, training and saving interfaces of Keras."""

from __future__ import annotations

from . import archive  # registers the class that Keras needs to read the files
from .model import WrappedKeras, model_of
from .wrapping import check_backend, wrap, wrap_function

__all__ = ["WrappedKeras", "archive", "check_backend", "model_of", "wrap", "wrap_function"]
