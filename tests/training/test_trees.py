"""Nested batches and outputs (named inputs, dataclass outputs, unlabelled tokens, several targets): equal to a plain loop."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.training_models import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from workbench import compose, sculpt, vote
from workbench.errors import WorkbenchWarning
from workbench.outputs import Logits

ROWS, LENGTH = 12, 6


@dataclass
class TokenOutput:
    """As networks of transformers return it."""

    logits: Tensor
    score: Tensor
    hidden: Tensor


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.tags, self.score = nn.Embedding(9, 5), nn.Linear(5, 4), nn.Linear(5, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> TokenOutput:
        hidden = torch.tanh(self.embedding(input_ids)) * attention_mask[..., None]
        return TokenOutput(self.tags(hidden), self.score(hidden.mean(1)), hidden)


def rows() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (ROWS, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1), generator=generator)).long()
    tags = (ids % 4).where(mask.bool(), -100)
    return {"input_ids": ids, "attention_mask": mask}, {"logits": tags, "score": ids.float().mean(1, keepdim=True)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("in_loader", [False, True])
@pytest.mark.parametrize("n_voters", [0, 2])
def test_trees_are_trained_on_as_in_a_plain_loop(n_voters: int, in_loader: bool, several: bool) -> None:
    x, y = rows()
    targets: Any = y if several else y["logits"]
    output = {"logits": Logits(dim=-1), "score": "values"} if several else {"logits": Logits(dim=-1)}
    torch.manual_seed(0)
    model = Tagger()
    wrapped = (vote.Wrapper(n_voters) if n_voters else compose()).with_options(output=output)(model)
    plain = [copy.deepcopy(voter) for voter in wrapped.voters()] if n_voters else [copy.deepcopy(model)]
    pairs = [
        ({k: v[i] for k, v in x.items()}, {k: v[i] for k, v in y.items()} if several else targets[i])
        for i in range(ROWS)
    ]
    data: Any = DataLoader(pairs, batch_size=ROWS) if in_loader else (x, targets)
    options = {} if in_loader else {"batch_size": ROWS}
    quiet(wrapped, data, epochs=3, validation=0, standardize=None if in_loader else False, optimizer=sgd, **options)

    steps = sgd([p for member in plain for p in member.parameters()])
    for _ in range(3):
        losses = []
        for member in plain:
            said = member(**x)
            loss = F.cross_entropy(said.logits.flatten(0, 1), y["logits"].flatten(), ignore_index=-100)
            losses.append(loss + F.mse_loss(said.score, y["score"]) if several else loss)
        steps.zero_grad()
        torch.stack(losses).mean().backward()
        steps.step()
    trained = wrapped.voters() if n_voters else [wrapped]
    for member, expected in zip(trained, plain, strict=True):
        assert torch.allclose(member(**x).logits, expected(**x).logits, atol=1e-5)
        assert torch.allclose(member(**x).score, expected(**x).score, atol=1e-5)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def test_the_error_about_several_targets_shows_the_line_that_works() -> None:
    x = torch.randn(20, 2)
    pair = x, (x[:, :1], torch.cat([x, x[:, :1]], 1))
    with pytest.raises(TypeError, match=r'output=\{0: "values", 1: "values"\}'):
        quiet(vote.Wrapper(2)(Two()), pair, epochs=1)
    told = vote.Wrapper(2, output={0: "values", 1: "values"})(Two())
    quiet(told, pair, epochs=1)


class Named(nn.Module):
    """Two heads on a trunk, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(2, 4), nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        return {"one": self.one(h), "other": self.other(h)}


NAMED: Any = {"one": "values", "other": "logits"}


@pytest.mark.parametrize("in_loader", [False, True])
@pytest.mark.parametrize("wrap", [vote.Wrapper(2, output=NAMED), sculpt.Wrapper(output=NAMED), compose(output=NAMED)])
def test_an_output_without_targets_is_told_once(wrap: Any, in_loader: bool) -> None:
    x = torch.randn(20, 2)
    pair = x, {"one": x[:, :1]}
    data: Any = DataLoader([(row, {"one": row[:1]}) for row in x], 10) if in_loader else pair
    wrapped = wrap(Named())
    with pytest.warns(
        WorkbenchWarning, match=r"targets for 'one', and none for 'other', which no loss trains.*Give y=\{'other': ..."
    ) as told:
        quiet(wrapped, data, epochs=1, validation=0)
    assert len([warning for warning in told if "none for" in str(warning.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(wrapped, data, epochs=1, validation=0)


@pytest.mark.parametrize("case", ["all targets", "auxiliary", "frozen", "own criterion"])
def test_outputs_that_are_left_out_on_purpose_are_not_told(case: str) -> None:
    x = torch.randn(20, 2)
    y: Any = {"one": x[:, :1]} | ({"other": torch.arange(20) % 3} if case == "all targets" else {})
    model = Named()
    if case == "frozen":
        model.trunk.requires_grad_(False)
        model.other.requires_grad_(False)
    wrapped: Any = sculpt.Wrapper(output={"one": "values"} if case == "auxiliary" else NAMED)(model)
    if case in ("frozen", "own criterion"):
        wrapped = vote.Wrapper(2, output=NAMED)(model) if case == "own criterion" else compose(output=NAMED)(model)
    criterion: Any = (lambda p, t: F.mse_loss(p["one"], t["one"])) if case == "own criterion" else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(wrapped, (x, y), epochs=1, criterion=criterion)
