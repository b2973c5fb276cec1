"""Explorers of pairs (x, y): names of frames, targets whose dtype says another task than the model, and remedies in refusals."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from workbench import data, sculpt, vote
from workbench.widgets import Comparison, Explorer

N = 60
COLUMNS = ["age (years)", "dose", "place"]


def network(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))


class Flat(nn.Module):
    """One number a row, [rows]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, 0]


class Two(Flat):
    """A prediction beside its features, as a dict or a tuple."""

    def __init__(self, form: type) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return {"dose": y, "features": x} if self.form is dict else (y, x)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, 3)


def wrapped(model: nn.Module, output: Any = None) -> Any:
    return vote.Wrapper(2, output=output)(model).eval()


def errors(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return (model(x).reshape(-1) - y).abs()


# ------------------------------------------------------------------------------------------------------------- names
def test_names_of_frames_are_kept(x: Tensor) -> None:
    frame, y = pd.DataFrame(x.numpy(), columns=COLUMNS), pd.Series(x[:, 0].numpy(), name="strength")
    for target in (y, y.to_frame()):
        explorer = Explorer(wrapped(network()), (frame, target))
        assert [column.name for column in explorer.data.features] == COLUMNS
        assert explorer.data.target.name == "strength"
        assert explorer.edit({"dose": 2.0}).x[1] == 2
    several = Explorer(wrapped(network(2)), (frame, torch.stack([x[:, 0], x[:, 1]], 1)))
    assert [column.name for column in several.data.features] == COLUMNS
    made = data.Data.from_arrays(frame, y)
    assert [column.name for column in made.features] == COLUMNS
    assert made.target.name == "strength"
    assert [column.name for column in Comparison(network(), (frame, y)).data.features] == COLUMNS


@pytest.mark.parametrize("names", [[0, 1, 2], ["a", "a", "b"]])
def test_columns_without_names_of_their_own_are_numbered(x: Tensor, names: list[Any]) -> None:
    frame = pd.DataFrame(x.numpy(), columns=names)
    for made in (Explorer(wrapped(network()), (frame, x[:, 0])).data, data.Data.from_arrays(frame, x[:, 0])):
        assert [column.name for column in made.features] == ["x1", "x2", "x3"]
        assert made.target.name == "y"
    named = data.Data.from_arrays(frame, pd.Series(x[:, 0], name="z"), features=COLUMNS, target="w")
    assert ([column.name for column in named.features], named.target.name) == (COLUMNS, "w")


# ------------------------------------------------------------------------------------------------------------- targets
@pytest.mark.parametrize("model", [network, Flat])
@pytest.mark.parametrize("form", ["long", "column", "numpy", "list", "uint8", "negative"])
def test_whole_numbers_are_values_to_a_model_of_one_value(x: Tensor, model: Any, form: str) -> None:
    counts = torch.poisson(4 * x[:, 0].abs()).long() - (3 if form == "negative" else 0)
    targets = {"column": counts[:, None], "numpy": counts.numpy(), "list": counts.tolist(), "uint8": counts.byte()}
    wrapped_model = wrapped(model())
    explorer = Explorer(wrapped_model, (x, targets.get(form, counts)), by="error")
    test = explorer.data.test
    places = [next(i for i in range(N) if torch.equal(x[i], row)) for row in test.x]
    assert explorer.data.classes is None
    assert test.y.tolist() == counts[places].float()[:, None].tolist()
    expected = errors(wrapped_model, test.x, counts[places].float())
    assert explorer.ranked.tolist() == expected.argsort(descending=True, stable=True).tolist()


def test_counts_of_a_poisson_model_are_values(x: Tensor) -> None:
    wrapped_model = sculpt.Wrapper(torch.distributions.Poisson)(network()).eval()
    explorer = Explorer(wrapped_model, (x, torch.poisson(4 * x[:, 0].abs()).long()))
    assert explorer.data.task == "regression"
    assert "aleatoric" in explorer.risk.names()


@pytest.mark.parametrize("model", [network, Flat])
@pytest.mark.parametrize("form", ["float", "column", "numpy", "whole"])
def test_a_yes_or_no_takes_zero_and_one_in_any_dtype(x: Tensor, model: Any, form: str) -> None:
    yes = x[:, 0] > 0
    targets = {"column": yes.float()[:, None], "numpy": yes.double().numpy(), "whole": yes.long()}
    wrapped_model = wrapped(model(), "binary")
    explorer = Explorer(wrapped_model, (x, targets.get(form, yes.float())), by="error")
    with torch.no_grad():
        logits = wrapped_model(explorer.data.test.x).reshape(-1)
    lost = nn.functional.binary_cross_entropy_with_logits(logits, explorer.data.test.y.float(), reduction="none")
    assert explorer.values.tolist() == pytest.approx(lost.sort(descending=True).values.tolist(), rel=1e-4)
    assert explorer.data.classes == ("0", "1")


@pytest.mark.slow
def test_zero_and_one_of_an_unsaid_output_are_refused_with_both_remedies(x: Tensor) -> None:
    yes = (x[:, 0] > 0).long()
    for model in (network(), Flat()):
        with pytest.raises(ValueError, match=r'y is 0 or 1.* output="binary" if .* output="values" if'):
            Explorer(wrapped(model), (x, yes))
        assert Explorer(wrapped(model, "binary"), (x, yes)).data.task == "classification"
        assert Explorer(wrapped(model, "values"), (x, yes)).data.task == "regression"
        assert Explorer(wrapped(model), (x, yes.float())).data.task == "regression"
        with pytest.raises(ValueError, match=r'y is 0 or 1.* output="binary"'):
            Explorer({"one": wrapped(model), "other": wrapped(model)}, (x, yes))


def test_scores_of_classes_still_take_class_numbers(x: Tensor) -> None:
    labels = torch.arange(N) % 3
    for output in ("logits", None):
        explorer = Explorer(wrapped(network(3), output), (x, labels))
        assert explorer.data.classes == ("0", "1", "2")
    assert Explorer(wrapped(network(2), "logits"), (x, x[:, 0] > 0)).data.classes == ("False", "True")


# ------------------------------------------------------------------------------------------------------------- refusals
def test_other_misfits_say_what_to_do(x: Tensor) -> None:
    labels, values = torch.arange(N) % 3, x[:, 0]
    named = data.Data.from_arrays(x, labels, classes=3)
    halves = data.Data.from_arrays(x, labels % 2, classes=["no", "yes"])
    for model, dataset, remedy in (
        (wrapped(network(3), "logits"), (x, values), "for class numbers give y.long()"),
        (wrapped(network(2), "logits"), (x, labels), "targets of the same classes"),
        (wrapped(network(3)), (x, values), "returns only that output"),
        (wrapped(network()), named, "values or counts, and no class numbers, give y.float()"),
        (wrapped(network()), halves, 'wrap the model with output="binary"'),
        (wrapped(network(), "binary"), (x, values), "the targets are values"),
    ):
        with pytest.raises(ValueError, match=f"(?i){re.escape(remedy)}"):
            Explorer(model, dataset)


@pytest.mark.parametrize(("form", "name"), [(dict, "dose"), (tuple, "0")])
def test_several_outputs_are_named_in_the_remedy_which_works(x: Tensor, form: type, name: str) -> None:
    with pytest.raises(TypeError, match=rf"gives a {form.__name__}; .*output=\{{'{name}': 'values'\}}") as caught:
        Explorer(wrapped(Two(form)), (x, x[:, 0]))
    assert "calibration" not in str(caught.value)
    assert len(Explorer(wrapped(Two(form), {name: "values"}), (x, x[:, 0])).rows) == N // 5


@pytest.mark.parametrize("key", [2, "place"])
def test_a_constant_feature_is_named_when_it_can_not_be_edited(x: Tensor, key: Any) -> None:
    x[:, 2] = 1
    explorer = Explorer(wrapped(network()), (pd.DataFrame(x.numpy(), columns=COLUMNS), x[:, 0].numpy()))
    before = explorer.x
    with pytest.raises(
        ValueError, match=r"^place: it is constant in the training rows, .* there are age \(years\), dose$"
    ):
        explorer.edit({"dose": 1.0, key: 2.0})
    assert torch.equal(explorer.x, before)
    assert explorer.edits == {}
    with pytest.raises(KeyError, match="there is no 'weight' to edit; there are age"):
        explorer.edit(weight=2.0)
    with pytest.raises(KeyError, match="there is no 3 to edit"):
        explorer.edit({3: 2.0})


def test_constant_features_alone_leave_nothing_to_edit() -> None:
    explorer = Explorer(wrapped(network()), (np.ones((N, 3), dtype="float32"), np.arange(N) / N))
    with pytest.raises(ValueError, match=r"x1: it is constant in the training rows.*no other feature varies either"):
        explorer.edit({"x1": 2.0})
