"""Conversion of the weights of a wrapped Keras model to and from the stores of Keras files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..additions import MARK

_NAMES = "workbench_names"
_SEED = f"seed{MARK}keras."


def write_into(store: Any, wrapped: Any, seeds: Iterable[Any]) -> None:
    """Write the state of a wrapped torch module, settings included.

    Args:
        store: mapping from names to arrays, provided by Keras.
        wrapped: the module.
        seeds: seed variables of random layers.
    """
    state = wrapped.state_dict() | {f"{_SEED}{i}": seed.value for i, seed in enumerate(seeds)}
    kinds = {name: str(value.dtype).removeprefix("torch.") for name, value in state.items()}
    store[_NAMES] = np.frombuffer(json.dumps(kinds).encode(), dtype=np.uint8)
    for i, value in enumerate(state.values()):
        value = value.detach().cpu()
        store[str(i)] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def seeds_of(plain: Any) -> list[Any]:
    """Return the seed variables of the random layers of a plain model, without duplicates."""
    generators = [generator for layer in plain._flatten_layers() for generator in layer._seed_generators]
    return [*{id(generator.state): generator.state for generator in generators}.values()]


def load_from(store: Any, wrapped: Any, seeds: Iterable[Any]) -> None:
    """Load what `write_into` wrote; seed variables that the file does not contain are unchanged.

    Raises:
        ValueError: if the file holds the weights of a plain model.
        RuntimeError: if it holds those of a model that was wrapped or built in another way.
    """
    if _NAMES not in set(store.keys()):
        raise ValueError(
            "the file holds the weights of a plain Keras model: load it into the plain model, and wrap that afterwards (vote with "
            "finetune=True starts every voter there)"
        )
    kinds = json.loads(np.asarray(store[_NAMES]).astype(np.uint8).tobytes().decode())
    state = {
        name: torch.from_numpy(np.array(store[str(i)])).to(getattr(torch, kind))
        for i, (name, kind) in enumerate(kinds.items())
    }
    stored = [state.pop(name) for name in [*state] if name.startswith(_SEED)]
    wrapped.load_state_dict(state)
    for seed, value in zip(seeds, stored, strict=False):
        seed.assign(value)


__all__ = ["load_from", "seeds_of", "write_into"]
