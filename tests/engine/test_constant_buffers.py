"""Buffers that a model only reads stay unchanged to the last bit, however many branches are merged."""

import pytest
import torch
from torch import nn

from workbench import compose, sample, sculpt, vote


class Masked(nn.Module):
    """A mask of the least finite number, as attention has it, numbers of all sizes, and whole ones."""

    def __init__(self, norm):
        super().__init__()
        self.fc, self.dropout = nn.Linear(3, 3), nn.Dropout(0.1)
        self.register_buffer("mask", torch.full((3, 3), torch.finfo().min).triu(1))
        self.register_buffer("numbers", torch.rand(3, 300))
        self.register_buffer("columns", torch.tensor([2, 1, 0]))
        self.norm = norm

    def forward(self, x):
        x = self.norm(self.dropout(self.fc(x)))[:, self.columns]
        return x @ (self.fc.weight + self.mask).softmax(-1) + (x @ self.numbers).mean(1, keepdim=True)


@pytest.mark.parametrize("strategy", ["auto", "loop", "vmap"])
@pytest.mark.parametrize(
    "parts",
    [(sample,), (sculpt,), (sample, sculpt), (vote, sample)],
    ids=["sample", "sculpt", "sample+sculpt", "vote+sample"],
)
def test_buffers_that_are_only_read_stay_as_they_are(parts, strategy):
    # whose statistics are no constants; vmap does not take it with noise before it
    norm = nn.Identity() if strategy == "vmap" else nn.BatchNorm1d(3)
    model = Masked(norm).train()
    constants = {name: getattr(model, name).clone() for name in ("mask", "numbers", "columns")}
    makers = {vote: lambda: vote.Wrapper(3, strategy=strategy), sample: lambda: sample.Wrapper(7, strategy=strategy)}
    makers[sculpt] = lambda: sculpt.Wrapper(strategy=strategy)
    wrapped = compose(*(makers[part]() for part in parts))(model).train()
    for _ in range(3):
        wrapped(torch.randn(12, 3), return_risk=True)
    for name, value in constants.items():
        kept = getattr(wrapped, name)
        assert torch.equal(kept, value.expand_as(kept)), name
        assert torch.equal(getattr(model, name), value), name
    assert strategy == "vmap" or wrapped.norm.running_mean.any()  # what is written is merged as ever


def test_one_that_no_file_holds_can_be_assigned():
    model = nn.Linear(2, 1)
    model.register_buffer("steps", torch.ones(2), persistent=False)
    wrapped = vote.Wrapper(2)(model)
    wrapped.steps = torch.zeros(3)
    assert torch.equal(wrapped.steps, torch.zeros(3))
    assert "steps" not in wrapped.state_dict()
