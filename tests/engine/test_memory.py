"""A call leaves nothing in memory, and frees it at once rather than at the next garbage collection."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from workbench import compose, neo, sample, sculpt, vote

WRAPPERS = {
    "plain": compose(),
    "loop": vote.Wrapper(3, strategy="loop"),
    "vmap": vote.Wrapper(3, strategy="vmap"),
    "replay": vote.Wrapper(3, share=1, strategy="replay"),
    "shared trunk": vote.Wrapper(3, share=1),
    "sculpt": sculpt.Wrapper(),
    "sample": sample.Wrapper(),
    "neo": neo.Wrapper(),
    "nested": compose(vote.Wrapper(2, share=1, strategy="vmap"), sculpt.Wrapper(n_layers=1)),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_inputs_and_outputs_are_freed_with_their_last_reference(name: str, training: bool) -> None:
    wrapped: Any = WRAPPERS[name](nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    if wrapped.needs_fit:
        wrapped.fit(torch.rand(60, 4, generator=torch.Generator().manual_seed(0)))
    wrapped.train(training)
    for _ in range(2):
        wrapped(torch.rand(6, 4), return_risk=True)
    gc.collect()
    gc.disable()
    try:
        x = torch.rand(6, 4)
        y, risk = wrapped(x, return_risk=True)
        kept = [weakref.ref(x), weakref.ref(y)]
        del x, y, risk
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()
