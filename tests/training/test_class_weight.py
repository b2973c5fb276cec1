"""Class weights of `fit`: equal to torch's weighted losses, balanced as in scikit-learn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training_models import quiet, same, weights
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from workbench import compose, laplace, neo, sculpt, vote
from workbench.outputs import Binary, Logits, Probs

VOID = -100
WEIGHT = torch.tensor([0.5, 2.0, 3.0])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def drawn(*shape: int, classes: int = 3, void: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    labels = (torch.rand(*shape, generator=generator) ** 2 * classes).long()
    if void and labels.dim() > 1:
        labels[:, -1] = VOID
    return labels


def linear(inputs: int, outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(inputs, outputs)


def convolution(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Conv2d(2, outputs, 1)


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def of_elements(scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Binary cross entropy, weighted by hand; weights [2] or [labels, 2] for no and yes."""
    each = torch.where(y.bool(), weight[..., 1], weight[..., 0])
    return (each * F.binary_cross_entropy_with_logits(scores, y.float(), reduction="none")).sum() / each.sum()


PROBS = nn.Sequential(linear(4, 3), nn.Softmax(-1))
PER_LABEL = torch.tensor([[1.0, 2.0], [0.5, 3.0]])
CASES: dict[str, tuple[Any, nn.Module, Tensor, Tensor, Any, Any]] = {
    "rows": ("logits", linear(4, 3), x_of(20, 4), drawn(20), WEIGHT, lambda s, y: F.cross_entropy(s, y, WEIGHT)),
    "rows unsaid": (None, linear(4, 3), x_of(20, 4), drawn(20), WEIGHT, lambda s, y: F.cross_entropy(s, y, WEIGHT)),
    "a list": ("logits", linear(4, 3), x_of(20, 4), drawn(20), [0.5, 2, 3], lambda s, y: F.cross_entropy(s, y, WEIGHT)),
    "probabilities": ("probs", PROBS, x_of(20, 4), drawn(20), WEIGHT, lambda p, y: F.nll_loss(p.log(), y, WEIGHT)),
    "soft labels": (
        Logits(),
        linear(4, 3),
        x_of(20, 4),
        x_of(20, 3).softmax(-1),
        WEIGHT,
        lambda s, y: F.cross_entropy(s, y, WEIGHT),
    ),
    "maps": (
        Logits(dim=1),
        convolution(3),
        x_of(8, 2, 4, 5),
        drawn(8, 4, 5),
        WEIGHT,
        lambda s, y: F.cross_entropy(s, y, WEIGHT, ignore_index=VOID),
    ),
    "maps of probabilities": (
        Probs(dim=1),
        nn.Sequential(convolution(3), nn.Softmax(1)),
        x_of(8, 2, 4, 5),
        drawn(8, 4, 5),
        WEIGHT,
        lambda p, y: F.nll_loss(p.log(), y, WEIGHT, ignore_index=VOID),
    ),
    "tokens": (
        Logits(dim=-1),
        linear(4, 3),
        x_of(8, 6, 4),
        drawn(8, 6),
        WEIGHT,
        lambda s, y: F.cross_entropy(s.flatten(0, 1), y.flatten(), WEIGHT, ignore_index=VOID),
    ),
    "yes or no": (
        "binary",
        linear(4, 1),
        x_of(20, 4),
        drawn(20, 1, classes=2, void=False),
        [0.5, 2.0],
        lambda s, y: F.cross_entropy(torch.cat([0 * s, s], 1), y[:, 0], torch.tensor([0.5, 2.0])),
    ),
    "several labels": (
        Binary(),
        linear(4, 2),
        x_of(20, 4),
        drawn(20, 2, classes=2, void=False),
        PER_LABEL,
        lambda s, y: of_elements(s, y, PER_LABEL),
    ),
    "a map of yes or no": (
        Binary(),
        convolution(1),
        x_of(8, 2, 4, 5),
        drawn(8, 1, 4, 5, classes=2, void=False),
        [1.0, 4.0],
        lambda s, y: of_elements(s, y, torch.tensor([1.0, 4.0])),
    ),
}


@pytest.mark.filterwarnings("ignore:the targets are class numbers, but the wrapper has no output=")
@pytest.mark.parametrize("n_voters", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_torchs_weighted_loss(name: str, n_voters: int) -> None:
    output, model, x, y, weight, by_hand = CASES[name]
    wrapper = vote.Wrapper(n_voters) if n_voters else compose()
    wrapped = wrapper.with_options(output=output)(copy.deepcopy(model))
    plain = [copy.deepcopy(voter) for voter in (wrapped.voters() if n_voters else [model])]
    step = sgd([p for member in plain for p in member.parameters()])
    torch.stack([by_hand(member(x), y) for member in plain]).mean().backward()
    step.step()
    quiet(
        wrapped,
        (x, y),
        epochs=1,
        batch_size=len(x),
        validation=0,
        standardize=False,
        optimizer=sgd,
        class_weight=weight,
    )
    for trained, expected in zip(wrapped.voters() if n_voters else [wrapped], plain, strict=True):
        assert torch.allclose(trained(x), expected(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore:the targets are class numbers, but the wrapper has no output=")
@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_epochs_do_not_depend_on_how_rows_fall_into_batches(name: str) -> None:
    output, model, x, y, class_weight, loss = CASES[name]
    rows = (x[:19], y[:19])  # the last batch is smaller, and the weights of batches differ
    history = quiet(
        compose(output=output)(copy.deepcopy(model)),
        rows,
        epochs=1,
        batch_size=3,
        validation=rows,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        standardize=False,
        class_weight=class_weight,
    )
    expected = loss(model(rows[0]), rows[1]).item()
    assert list(history.frame[["loss", "validation_loss"]].iloc[0]) == pytest.approx([expected, expected], rel=1e-5)


@pytest.mark.parametrize("name", ["rows", "maps", "tokens", "yes or no", "a map of yes or no"])
def test_balanced_is_that_of_scikit_learn(name: str) -> None:
    output, model, x, y, _, _ = CASES[name]
    kept = y[y != VOID].flatten().numpy()
    weight = compute_class_weight("balanced", classes=np.unique(kept), y=kept)
    assert_same_training(output, model, x, y, "balanced", torch.tensor(weight))


def test_balanced_labels_are_each_by_themselves_and_shares_count_as_shares() -> None:
    output, model, x, y, _, _ = CASES["several labels"]
    each = [compute_class_weight("balanced", classes=np.arange(2), y=label.numpy()) for label in y.T]
    assert_same_training(output, model, x, y, "balanced", torch.tensor(np.stack(each)))
    output, model, x, y, _, _ = CASES["soft labels"]
    assert_same_training(output, model, x, y, "balanced", len(y) / (3 * y.double().sum(0)))


def test_a_class_that_does_not_occur_has_weight_one_and_is_not_counted() -> None:
    x, y = x_of(20, 4), drawn(20, classes=2)
    n = y.bincount()
    assert_same_training("logits", linear(4, 4), x, y, "balanced", torch.tensor([10 / n[0], 10 / n[1], 1, 1]))


def assert_same_training(output: Any, model: nn.Module, x: Tensor, y: Any, one: Any, other: Any) -> None:
    results = []
    for class_weight in (one, other):
        wrapped = compose().with_options(output=output)(copy.deepcopy(model))
        quiet(wrapped, (x, y), epochs=1, validation=0, class_weight=class_weight)
        results.append(wrapped(x))
    assert torch.allclose(*results, atol=1e-6)


def test_balanced_counts_the_rows_trained_on_in_any_form() -> None:
    x, y = x_of(40, 4), drawn(40)
    results = []
    held = (x[30:], y[30:])
    for rows in ((x[:30], y[:30]), TensorDataset(x[:30], y[:30]), Lazy(x[:30], y[:30])):
        wrapped = compose().with_options(output="logits")(linear(4, 3))
        quiet(wrapped, rows, epochs=2, validation=held, standardize=False, class_weight="balanced")
        results.append(weights(wrapped))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


class Lazy(torch.utils.data.Dataset):
    """Rows that are read when they are asked for."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], int(self.y[i])


def test_several_outputs_have_weights_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.kind, self.depth = convolution(3), linear(2, 3), convolution(1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"map": self.map(x), "kind": self.kind(x.mean((2, 3))), "depth": self.depth(x)}

    output = {"map": Logits(dim=1), "kind": "logits", "depth": "values"}
    x = x_of(8, 2, 4, 5)
    y = {"map": drawn(8, 4, 5), "kind": drawn(8), "depth": x[:, :1]}
    model = Two()
    wrapped = compose().with_options(output=output)(copy.deepcopy(model))
    quiet(
        wrapped,
        (x, y),
        epochs=1,
        batch_size=8,
        validation=0,
        standardize=False,
        optimizer=sgd,
        class_weight={"map": WEIGHT},
    )
    step, scores = sgd(model.parameters()), model(x)
    loss = F.cross_entropy(scores["map"], y["map"], WEIGHT) + F.cross_entropy(scores["kind"], y["kind"])
    (loss + F.mse_loss(scores["depth"], y["depth"])).backward()
    step.step()
    for name, value in model(x).items():
        assert torch.allclose(wrapped(x)[name], value, atol=1e-6)
    for class_weight, match in (
        ("balanced", "'map', 'kind' have classes"),
        ({"depth": WEIGHT}, "'depth' is not an output with classes"),
        ({"map": [1.0, 2.0]}, r"class_weight\['map'\] has shape \[2\]"),
    ):
        with pytest.raises(ValueError, match=match):
            quiet(wrapped, (x, y), epochs=1, class_weight=class_weight)


def test_probabilities_shift_by_the_weights_and_come_back_by_dividing() -> None:
    """A model of a constant input alone: p is proportional to weight times frequency, in closed form."""
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    model = compose().with_options(output="logits")(linear(1, 3))
    steps = {"optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "standardize": False, "validation": 0}
    quiet(model, (torch.zeros(100, 1), y), epochs=100, batch_size=100, class_weight="balanced", **steps)
    p = model(torch.zeros(1, 1)).softmax(-1)[0]
    assert torch.allclose(p, torch.full((3,), 1 / 3), atol=1e-3)
    back = p / (100 / (3 * y.bincount()))
    assert torch.allclose(back / back.sum(), torch.tensor([0.6, 0.3, 0.1]), atol=1e-3)


def test_other_weights_are_another_training_for_a_checkpoint(tmp_path: Path) -> None:
    rows, path = (x_of(20, 4), drawn(20)), tmp_path / "state.pt"
    model = compose().with_options(output="logits")(linear(4, 3))
    quiet(model, rows, epochs=1, class_weight="balanced", checkpoint=path)
    with pytest.raises(ValueError, match=r"class weight: .* in the file"):
        quiet(model, rows, epochs=1, class_weight=WEIGHT, checkpoint=path)


ROWS, VALUES = (x_of(20, 4), drawn(20)), (x_of(20, 4), x_of(20, 3))
LOADER = DataLoader(TensorDataset(*ROWS), batch_size=10)
SOFT = sculpt.Wrapper(sculpt.LogitNormal, n_layers=1, output="logits")


@pytest.mark.parametrize(
    ("wrapper", "rows", "options", "match"),
    [
        (compose(), VALUES, {"class_weight": "balanced"}, "no output with a target holds class scores"),
        (compose(), VALUES, {"class_weight": WEIGHT}, "no output with a target holds class scores"),
        (
            vote.Wrapper(2, output="values"),
            VALUES,
            {"class_weight": WEIGHT},
            "no output with a target holds class scores",
        ),
        (vote.Wrapper(2, output="logits"), ROWS, {"class_weight": [1.0, 2.0]}, r"shape \[2\]"),
        (vote.Wrapper(2, output="logits"), ROWS, {"class_weight": 2.0}, r"shape \[\]"),
        (vote.Wrapper(2, output="logits"), ROWS, {"class_weight": [1.0, -2.0, 1.0]}, "0 or more"),
        (vote.Wrapper(2, output="logits"), ROWS, {"class_weight": [1.0, float("nan"), 1.0]}, "finite"),
        (vote.Wrapper(2, output="logits"), ROWS, {"class_weight": [1.0, float("inf"), 1.0]}, "finite"),
        (vote.Wrapper(2, output="logits"), ROWS, {"class_weight": [0.0, 0.0, 0.0]}, "not all 0"),
        (vote.Wrapper(2, output="logits"), ROWS, {"class_weight": "even"}, '"balanced"'),
        (vote.Wrapper(3, output="logits"), ROWS, {"class_weight": WEIGHT, "folds": 3}, "cross-fitting"),
        (vote.Wrapper(2, output="logits"), ROWS, {"class_weight": WEIGHT, "criterion": F.cross_entropy}, "default"),
        (vote.Wrapper(2, output="logits"), ROWS, {"class_weight": WEIGHT, "strategy": "ddp"}, "each process"),
        (vote.Wrapper(2, output="logits"), LOADER, {"class_weight": "balanced", "validation": 0}, "DataLoader"),
        (SOFT, ROWS, {"class_weight": WEIGHT}, "sculpt learns"),
        (laplace.Wrapper(output="logits"), ROWS, {"class_weight": WEIGHT}, "laplace learns"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    wrapper: Any, rows: Any, options: Any, match: str
) -> None:
    wrapped = wrapper(linear(4, 3))
    before = weights(wrapped)
    with pytest.raises(ValueError, match=match):
        quiet(wrapped, rows, epochs=1, **options)
    assert same(weights(wrapped), before)
    assert wrapped.training


def test_a_method_that_learns_without_classes_takes_weights() -> None:
    wrapped = compose(vote.Wrapper(2), neo.Wrapper()).with_options(output="logits")(linear(4, 3))
    quiet(wrapped, ROWS, epochs=1, class_weight="balanced")
    assert wrapped(ROWS[0], return_risk=True)[1].vacuitic.shape == (20,)
