"""What models of transformers call their cache of keys and values: `past_key_values`, and `cache` from version 5.24 on."""

from __future__ import annotations

import inspect

import pytest

transformers = pytest.importorskip("transformers")

CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
