"""The weights of a wrapped Keras model in the stores that Keras reads and writes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

_NAMES = "workbench_names"


def write_into(store: Any, wrapped: Any) -> None:
    """Write the state of a wrapped torch module, settings included.

    Args:
        store: what Keras gives: a mapping from names to arrays.
        wrapped: the module.
    """
    state = wrapped.state_dict()
    kinds = {name: str(value.dtype).removeprefix("torch.") for name, value in state.items()}
    store[_NAMES] = np.frombuffer(json.dumps(kinds).encode(), dtype=np.uint8)
    for i, value in enumerate(state.values()):
        value = value.detach().cpu()
        store[str(i)] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def load_from(store: Any, wrapped: Any) -> None:
    """Load what `write_into` wrote.

    Raises:
        ValueError: if the file holds the weights of a plain model.
        RuntimeError: if it holds those of a model that was wrapped or built otherwise.
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
    wrapped.load_state_dict(state)


__all__ = ["load_from", "write_into"]
