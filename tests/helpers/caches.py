"""Name of the key-value cache in models of transformers: `past_key_values`, or `cache` from version 5.24 on."""

from __future__ import annotations

import inspect

import pytest

transformers = pytest.importorskip("transformers")

CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
