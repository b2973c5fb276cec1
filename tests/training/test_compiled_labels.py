"""A compiled transformers model with labels, as a Trainer with `torch_compile` makes it: right, and started within seconds."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch

from workbench import vote
from workbench.outputs import Logits

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:vote. the model gives a number")
def test_compiled_gradients_are_the_eager_ones_and_soon_there() -> None:
    config = transformers.GPT2Config(
        vocab_size=30, n_layer=1, n_head=2, n_embd=8, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    wrapped: Any = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(transformers.GPT2LMHeadModel(config)).train()
    other = copy.deepcopy(wrapped)
    compiled, ids = torch.compile(other), torch.randint(3, 30, (8, 5))
    start = time.perf_counter()
    for _ in range(3):
        wrapped.zero_grad()
        other.zero_grad()
        wrapped(input_ids=ids, labels=ids).loss.backward()
        compiled(input_ids=ids, labels=ids).loss.backward()
        for name, parameter in wrapped.named_parameters():
            assert torch.equal(other.get_parameter(name).grad, parameter.grad), name
    # two minutes and more where Dynamo goes on with our functions one by one
    assert time.perf_counter() - start < 60
