"""Steps run by a graph equal eager steps to the last bit; where they would not, no graph is used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import replayed_steps
from helpers.default_suite import one_in
from helpers.replayed_steps import assert_same, train, waves
from helpers.traced_models import EAGER, TRACED, TRACED_STEPS, mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from workbench import compose, fit, laplace, neo, sample, sculpt, vote
from workbench.core.batches.rows import Batch
from workbench.core.calls import traceable
from workbench.errors import WorkbenchWarning
from workbench.training import traced_step
from workbench.training.traced_step import TracedStep

made = replayed_steps.made  # the fixture


@pytest.mark.parametrize("name", one_in(4, [*TRACED, *TRACED_STEPS]))
def test_traced_steps_are_the_same(name: str, made: list[TracedStep]) -> None:
    build, wrapper = {**TRACED, **TRACED_STEPS}[name]
    traced = train(build, wrapper)
    assert made[0].off == ""
    assert made[0].replays > 20
    assert_same(traced, train(build, wrapper, strategy="eager"))
    assert len(made) == 1


FOLDED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    **{name: (build, vote.Wrapper(6)) for name, (build, _) in TRACED.items() if "loop" not in name},
    "loop": (lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.1)), vote.Wrapper(6, strategy="loop")),
    "vote x sculpt": (mlp, compose(vote.Wrapper(6), sculpt.Wrapper(n_layers=1))),
    "vote x sample": (mlp, compose(vote.Wrapper(6), sample.Wrapper(4))),
    "vote x sculpt x neo": (mlp, compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1), neo.Wrapper())),
    "vote x laplace": (mlp, compose(vote.Wrapper(3), laplace.Wrapper())),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDED)
def test_traced_steps_of_folds_are_the_same(name: str, made: list[TracedStep]) -> None:
    build, wrapper = FOLDED[name]
    traced = train(build, wrapper, folds=3)
    assert made[0].off == ""
    assert made[0].replays > 15
    assert_same(traced, train(build, wrapper, folds=3, strategy="eager"))
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_what_is_not_sure_to_repeat_is_left_alone_with_folds(name: str, made: list[TracedStep]) -> None:
    build, wrapper = EAGER[name], vote.Wrapper(3, strategy="loop")
    try:
        expected = train(build, wrapper, folds=3, strategy="eager")
    except Exception as error:
        with pytest.raises(type(error)):
            train(build, wrapper, folds=3)
    else:
        assert_same(train(build, wrapper, folds=3), expected)
    # which writes into copies of its rows here, each time anew
    assert name == "writing" or not any(steps.replays for steps in made)


@pytest.mark.parametrize("name", one_in(4, EAGER))
def test_what_is_not_sure_to_repeat_is_left_alone(name: str, made: list[TracedStep]) -> None:
    build, wrapper = EAGER[name], vote.Wrapper(3, strategy="loop")
    try:
        expected = train(build, wrapper, strategy="eager")
    except Exception as error:
        with pytest.raises(type(error)):
            train(build, wrapper)
    else:
        assert_same(train(build, wrapper), expected)
    assert not any(steps.replays for steps in made)


@pytest.mark.parametrize(
    "criterion",
    one_in(
        5, [F.l1_loss, nn.HuberLoss(delta=0.5), nn.MSELoss(reduction="sum"), None, lambda y, t: (y - t).square().mean()]
    ),
)
def test_every_criterion_trains_the_same_as_eager_steps(criterion: Any, made: list[TracedStep]) -> None:
    wrapper = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))
    for folds in (None, 3):
        options = {"criterion": criterion, "folds": folds}
        assert_same(train(mlp, wrapper, **options), train(mlp, wrapper, strategy="eager", **options))
        assert (made.pop().replays > 15) is (getattr(criterion, "__name__", "") != "<lambda>")


@pytest.mark.parametrize("output", ["logits", "binary", "probs"])
def test_every_form_of_class_scores_trains_the_same_as_eager_steps(output: str, made: list[TracedStep]) -> None:
    x, y = waves()
    y = (y > 0).float() if output == "binary" else (y[:, 0] > 0).long()

    def build() -> nn.Module:
        torch.manual_seed(0)
        ends = {"logits": [nn.Linear(8, 3)], "binary": [nn.Linear(8, 1)], "probs": [nn.Linear(8, 3), nn.Softmax(-1)]}
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), *ends[output])

    evidence = "design" if output == "logits" else None
    wrapper = vote.Wrapper(4, output=output, evidence=evidence)
    assert_same(train(build, wrapper, (x, y)), train(build, wrapper, (x, y), strategy="eager"))
    assert made[0].replays > 20


OPTIONS: dict[str, dict[str, Any]] = {
    "own optimizer": {"optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01)},
    "weight decay": {"weight_decay": 0.1},
    "patience": {"patience": 2, "epochs": 30},
    "no validation": {"validation": 0},
    "units": {"standardize": False},
    "float64": {"dtype": torch.float64},
    "augment": {"augment": lambda x, y, generator: (x + 0.1 * torch.randn(x.shape, generator=generator), y)},
    "last batch": {"batch_size": 24, "epochs": 20},
}


@pytest.mark.parametrize("name", one_in(4, OPTIONS))
def test_every_option_of_fit_trains_the_same_as_eager_steps(name: str, made: list[TracedStep]) -> None:
    def build() -> nn.Module:
        return mlp(nn.Dropout(0.2))

    traced = train(build, vote.Wrapper(4), **OPTIONS[name])
    assert made[0].replays > 10
    assert_same(traced, train(build, vote.Wrapper(4), strategy="eager", **OPTIONS[name]))


@pytest.mark.parametrize("folds", [None, 3])
def test_interrupted_and_resumed(folds: int | None, made: list[TracedStep], tmp_path: Any) -> None:
    def build() -> nn.Module:
        return mlp(nn.BatchNorm1d(8), nn.Dropout(0.2))

    def interrupt(progress: Any) -> None:
        if progress.step == 25:
            raise KeyboardInterrupt

    path = tmp_path / "training.pt"
    options: dict[str, Any] = {"checkpoint": path, "epochs": 10, "folds": folds}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(build, vote.Wrapper(3), callback=interrupt, **options)
    resumed = train(build, vote.Wrapper(3), **options)
    assert_same(resumed, train(build, vote.Wrapper(3), epochs=10, folds=folds, strategy="eager"))
    assert made[-1].replays > 5


def test_an_interrupt_while_the_graph_is_made(made: list[TracedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(traced_step.Graph, "__init__", interrupted)
    torch.manual_seed(0)
    wrapped = vote.Wrapper(3)(mlp())
    with pytest.warns(WorkbenchWarning, match="interrupted"):
        fit(wrapped, waves(), epochs=3, batch_size=16, progress=False)
    assert wrapped(torch.zeros(2, 3)).isfinite().all()


def test_loss_that_is_not_finite(made: list[TracedStep]) -> None:
    x, y = waves()
    for strategy in (None, "eager"):
        wrapped = vote.Wrapper(3)(mlp())
        with pytest.raises(FloatingPointError, match="the loss is"):
            fit(wrapped, (x, y * 1e25), epochs=8, batch_size=16, standardize=False, progress=False, strategy=strategy)


def test_labels_that_are_none_in_a_later_batch(made: list[TracedStep]) -> None:
    """A graph can't look at them: its loss is NaN, and the step as ever says why."""
    x, y = waves(400)
    labels = (y > 0).float()
    labels[170] = 7
    wrapped = vote.Wrapper(3, output="binary")(mlp())
    rows = DataLoader(list(zip(x, labels, strict=True)), batch_size=8)
    with pytest.raises(ValueError, match=r"binary targets must lie in \[0, 1\], not from 0 to 7"):
        fit(wrapped, rows, epochs=3, progress=False, validation=0)
    assert made[0].replays > 10


def test_autoencoders_whose_targets_are_their_inputs(made: list[TracedStep]) -> None:
    x, _ = waves()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    assert_same(train(build, vote.Wrapper(3), (x, x)), train(build, vote.Wrapper(3), (x, x), strategy="eager"))


def test_short_trainings_make_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, (x, y) = vote.Wrapper(3)(mlp()), waves(16)

    def is_taken(remaining: int) -> bool:
        steps = TracedStep(wrapped, F.mse_loss, lambda batch: wrapped.loss(F.mse_loss, batch.x, batch.y))
        for _ in range(5):
            taken = steps.take(Batch(None, x, y), remaining)
            if taken is None:
                wrapped.loss(F.mse_loss, x, y)
        assert not steps.off
        return taken is not None

    assert not is_taken(50)
    assert is_taken(traced_step.MIN_STEPS)
    monkeypatch.setattr(traced_step, "LONG_STEP", 0.0)  # now all steps are long
    assert not is_taken(traced_step.MIN_STEPS)
    assert is_taken(traced_step.MIN_LONG_STEPS)


def test_no_graph_under_autocast_of_any_device(made: list[TracedStep]) -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        train(mlp, vote.Wrapper(3))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert not made[0].replays
    assert "another mode" in made[0].off


def test_rows_on_another_device_than_the_model(made: list[TracedStep]) -> None:
    wrapped = vote.Wrapper(3)(mlp()).train()
    steps = TracedStep(wrapped, F.mse_loss, lambda batch: wrapped.loss(F.mse_loss, batch.x, batch.y))
    rows = Batch(None, *(part.to("meta") for part in waves(16)))
    assert all(steps.take(rows, 1000) is None for _ in range(4))
    assert "another device" in steps.off


GRADIENT = torch.tensor([3.0, -1e-3, 0.0, 2.0])


@pytest.mark.parametrize(
    ("traced", "again", "close"),
    [
        (GRADIENT, GRADIENT, True),
        (GRADIENT * (1 + 1e-6), GRADIENT, True),  # rounding, where two eager steps happen to be equal
        (GRADIENT * 1.01, GRADIENT, False),
        (GRADIENT + torch.tensor([0, 0, 0.01, 0]), GRADIENT, False),
        (GRADIENT * 1.01, GRADIENT * 1.005, True),  # no worse than an eager step
        (GRADIENT + torch.nan, GRADIENT, False),
        (GRADIENT.clone().index_fill_(0, torch.tensor(1), torch.inf), GRADIENT, False),
    ],
)
def test_what_is_close_on_a_gpu(traced: Tensor, again: Tensor, close: bool) -> None:
    count = torch.tensor(4)
    assert bool(traced_step._close([traced, None, count], [GRADIENT, None, count], [again, None, count])) is close
    assert not traced_step._close([traced, count], [GRADIENT, count + 1], [again, count + 1])
    strange = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert traced_step._close([strange], [strange], [strange])
    assert not traced_step._close([strange], [-strange], [strange])


def test_without_what_torch_keeps_for_itself(made: list[TracedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchScript's reader of graphs is gone: the same graph is run by Python."""
    monkeypatch.delattr(torch._C, "parse_ir")
    traced = train(mlp, vote.Wrapper(4))
    assert made[0].replays > 20
    assert_same(traced, train(mlp, vote.Wrapper(4), strategy="eager"))


def test_without_knowing_what_packs_saved_tensors(made: list[TracedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Older torch can't tell: steps stay eager."""
    monkeypatch.setattr(traceable, "_TOP_HOOKS", None)
    trained = train(mlp, vote.Wrapper(4))
    assert not made[0].replays
    assert_same(trained, train(mlp, vote.Wrapper(4), strategy="eager"))
