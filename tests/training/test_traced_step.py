"""Steps run by a graph equal eager steps to the last bit; where they would not, no graph is used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import traced_models
from helpers.replayed_steps import replay_early
from helpers.traced_models import EAGER, TRACED, TRACED_STEPS, ListItem, ReadsGlobal, Residual, mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from workbench import compose, fit, laplace, neo, sample, sculpt, vote
from workbench.core.batches.rows import Batch
from workbench.core.calls import traceable
from workbench.errors import WorkbenchWarning
from workbench.training import traced_step
from workbench.training.traced_step import TracedStep


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TracedStep]:
    return replay_early(monkeypatch)


def _rows(n: int = 100) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return x, torch.sin(2 * x.sum(1, keepdim=True))


def _train(build: Callable[[], nn.Module], wrapper: Any, data: Any = None, **options: Any) -> tuple[Any, ...]:
    """Weights and buffers, losses, and the global random states afterwards."""
    torch.manual_seed(0)
    traced_models.NOISE = np.random.default_rng(0)
    wrapped = wrapper(build())
    settings = {"epochs": 6, "batch_size": 16, "progress": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkbenchWarning)
        history = fit(wrapped, data or _rows(), **settings)
    state = {name: value for name, value in wrapped.state_dict().items() if isinstance(value, Tensor)}
    return state, [record[:4] for record in history.records], torch.get_rng_state()


def _assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert str(one[1]) == str(other[1])  # where there is no validation, its loss is NaN
    assert torch.equal(one[2], other[2])


@pytest.mark.parametrize("name", [*TRACED, *TRACED_STEPS])
def test_traced_steps_are_the_same(name: str, made: list[TracedStep]) -> None:
    build, wrapper = {**TRACED, **TRACED_STEPS}[name]
    traced = _train(build, wrapper)
    assert made[0].off == ""
    assert made[0].replays > 20
    _assert_same(traced, _train(build, wrapper, strategy="eager"))
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
    traced = _train(build, wrapper, folds=3)
    assert made[0].off == ""
    assert made[0].replays > 15
    _assert_same(traced, _train(build, wrapper, folds=3, strategy="eager"))
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_what_is_not_sure_to_repeat_is_left_alone_with_folds(name: str, made: list[TracedStep]) -> None:
    build, wrapper = EAGER[name], vote.Wrapper(3, strategy="loop")
    try:
        expected = _train(build, wrapper, folds=3, strategy="eager")
    except Exception as error:
        with pytest.raises(type(error)):
            _train(build, wrapper, folds=3)
    else:
        _assert_same(_train(build, wrapper, folds=3), expected)
    # which writes into copies of its rows here, each time anew
    assert name == "writing" or not any(steps.replays for steps in made)


@pytest.mark.parametrize("name", EAGER)
def test_what_is_not_sure_to_repeat_is_left_alone(name: str, made: list[TracedStep]) -> None:
    build, wrapper = EAGER[name], vote.Wrapper(3, strategy="loop")
    try:
        expected = _train(build, wrapper, strategy="eager")
    except Exception as error:
        with pytest.raises(type(error)):
            _train(build, wrapper)
    else:
        _assert_same(_train(build, wrapper), expected)
    assert not any(steps.replays for steps in made)


@pytest.mark.parametrize(
    "criterion",
    [F.l1_loss, nn.HuberLoss(delta=0.5), nn.MSELoss(reduction="sum"), None, lambda y, t: (y - t).square().mean()],
)
def test_criteria(criterion: Any, made: list[TracedStep]) -> None:
    wrapper = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1))
    for folds in (None, 3):
        options = {"criterion": criterion, "folds": folds}
        _assert_same(_train(mlp, wrapper, **options), _train(mlp, wrapper, strategy="eager", **options))
        assert (made.pop().replays > 15) is (getattr(criterion, "__name__", "") != "<lambda>")


@pytest.mark.parametrize("output", ["logits", "binary", "probs"])
def test_classes(output: str, made: list[TracedStep]) -> None:
    x, y = _rows()
    y = (y > 0).float() if output == "binary" else (y[:, 0] > 0).long()

    def build() -> nn.Module:
        torch.manual_seed(0)
        ends = {"logits": [nn.Linear(8, 3)], "binary": [nn.Linear(8, 1)], "probs": [nn.Linear(8, 3), nn.Softmax(-1)]}
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), *ends[output])

    evidence = "design" if output == "logits" else None
    wrapper = vote.Wrapper(4, output=output, evidence=evidence)
    _assert_same(_train(build, wrapper, (x, y)), _train(build, wrapper, (x, y), strategy="eager"))
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


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, made: list[TracedStep]) -> None:
    def build() -> nn.Module:
        return mlp(nn.Dropout(0.2))

    traced = _train(build, vote.Wrapper(4), **OPTIONS[name])
    assert made[0].replays > 10
    _assert_same(traced, _train(build, vote.Wrapper(4), strategy="eager", **OPTIONS[name]))


def _by_callback(
    change: Callable[[Any, int], None], build: Callable[[], nn.Module] = mlp, **options: Any
) -> tuple[Any, Any]:
    def run(**more: Any) -> tuple[Any, ...]:
        def callback(progress: Any) -> None:
            if not progress.epoch_ended:
                change(progress.wrapped, progress.step)

        return _train(build, vote.Wrapper(3), callback=callback, **options, **more)

    return run(), run(strategy="eager")


def _freeze(wrapped: Any, step: int) -> None:
    next(wrapped.parameters()).requires_grad_(step % 20 < 10)


def _hook(wrapped: Any, step: int) -> None:
    if step == 20:
        list(wrapped.modules())[1].register_forward_hook(lambda module, args, out: 2 * out)


def _hook_gradient(wrapped: Any, step: int) -> None:
    if step == 20:
        next(wrapped.parameters()).register_hook(lambda gradient: 2 * gradient)


def _global_hook(wrapped: Any, step: int) -> None:
    if step == 20:
        _HANDLES.append(nn.modules.module.register_module_forward_hook(_doubling))
    if step == 35:
        _HANDLES.pop().remove()


_HANDLES: list[Any] = []


def _doubling(module: nn.Module, args: Any, out: Any) -> Any:
    return 2 * out if type(module) is nn.Tanh else out


def _swap_layer(wrapped: Any, step: int) -> None:
    if step == 20:
        wrapped[1] = nn.ReLU()


class Doubled(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.tanh()


def _class(wrapped: Any, step: int) -> None:
    if step == 20:
        wrapped[1].__class__ = Doubled


def _weights(wrapped: Any, step: int) -> None:
    if step % 15 == 0:
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.mul_(0.9)


def _predict(wrapped: Any, step: int) -> None:
    wrapped(torch.randn(5, 3), return_risk=True)
    wrapped.eval()(torch.zeros(2, 3))


def _grad_left(wrapped: Any, step: int) -> None:
    if step % 10 == 0:
        wrapped.loss(F.mse_loss, *_rows(20)).backward()


def _rate(wrapped: Any, step: int) -> None:
    wrapped[2].p = 0.1 if step < 20 else 0.7


def _patch_torch(wrapped: Any, step: int) -> None:
    nn.Tanh.forward = _TANH if not 20 <= step < 30 else lambda self, x: 2 * x.tanh()  # type: ignore[assignment,misc]


_TANH = nn.Tanh.forward
CHANGES = (
    _freeze,
    _hook,
    _hook_gradient,
    _global_hook,
    _swap_layer,
    _class,
    _weights,
    _predict,
    _grad_left,
    _rate,
    _patch_torch,
)


@pytest.mark.parametrize("folds", [None, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_from_outside_are_noticed(
    change: Callable[[Any, int], None], folds: int | None, made: list[TracedStep]
) -> None:
    options = {} if folds is None else {"folds": folds, "epochs": 9}
    try:
        _assert_same(*_by_callback(change, lambda: mlp(nn.Dropout(0.1)), **options))
    finally:
        nn.Tanh.forward = _TANH  # type: ignore[method-assign]
        for handle in _HANDLES:
            handle.remove()
        _HANDLES.clear()
    assert made[0].replays > 5


def test_a_global_and_an_attribute_that_change(made: list[TracedStep]) -> None:
    def change(wrapped: Any, step: int) -> None:
        traced_models.SCALE = 1.0 if step < 20 else 0.25

    def build() -> nn.Module:
        traced_models.SCALE = 1.0
        return ReadsGlobal()

    _assert_same(*_by_callback(change, build))
    traced_models.SCALE = 1.0

    def switch(wrapped: Any, step: int) -> None:
        wrapped.deep, wrapped.scale = step < 20, 0.5 if step < 30 else 0.1

    _assert_same(*_by_callback(switch, Residual))
    assert all(steps.replays > 20 for steps in made)


def test_list_items_that_a_callback_changes(made: list[TracedStep]) -> None:
    def change(wrapped: Any, step: int) -> None:
        wrapped.scales[0] = 1.0 if step < 20 else 0.25

    _assert_same(*_by_callback(change, ListItem))
    assert made[0].replays == 0


def test_a_difference_ends_tracing_and_is_told(made: list[TracedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that no guard sees: an operation of torch is exchanged under it."""
    layer = F.gelu

    def change(progress: Any) -> None:
        if progress.step == 20:
            monkeypatch.setattr(F, "gelu", lambda *args, **kwargs: 2 * layer(*args, **kwargs))

    wrapped = vote.Wrapper(3)(mlp(nn.GELU()))
    with pytest.warns(WorkbenchWarning, match="changed what a training step computes"):
        fit(wrapped, _rows(), epochs=10, batch_size=16, progress=False, callback=change)
    assert "other numbers" in made[0].off


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
        _train(build, vote.Wrapper(3), callback=interrupt, **options)
    resumed = _train(build, vote.Wrapper(3), **options)
    _assert_same(resumed, _train(build, vote.Wrapper(3), epochs=10, folds=folds, strategy="eager"))
    assert made[-1].replays > 5


def test_an_interrupt_while_the_graph_is_made(made: list[TracedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(traced_step.Graph, "__init__", interrupted)
    torch.manual_seed(0)
    wrapped = vote.Wrapper(3)(mlp())
    with pytest.warns(WorkbenchWarning, match="interrupted"):
        fit(wrapped, _rows(), epochs=3, batch_size=16, progress=False)
    assert wrapped(torch.zeros(2, 3)).isfinite().all()


def test_loss_that_is_not_finite(made: list[TracedStep]) -> None:
    x, y = _rows()
    for strategy in (None, "eager"):
        wrapped = vote.Wrapper(3)(mlp())
        with pytest.raises(FloatingPointError, match="the loss is"):
            fit(wrapped, (x, y * 1e25), epochs=8, batch_size=16, standardize=False, progress=False, strategy=strategy)


def test_labels_that_are_none_in_a_later_batch(made: list[TracedStep]) -> None:
    """A graph can't look at them: its loss is NaN, and the step as ever says why."""
    x, y = _rows(400)
    labels = (y > 0).float()
    labels[170] = 7
    wrapped = vote.Wrapper(3, output="binary")(mlp())
    rows = DataLoader(list(zip(x, labels, strict=True)), batch_size=8)
    with pytest.raises(ValueError, match=r"binary targets must lie in \[0, 1\], not from 0 to 7"):
        fit(wrapped, rows, epochs=3, progress=False, validation=0)
    assert made[0].replays > 10


def test_autoencoders_whose_targets_are_their_inputs(made: list[TracedStep]) -> None:
    x, _ = _rows()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    _assert_same(_train(build, vote.Wrapper(3), (x, x)), _train(build, vote.Wrapper(3), (x, x), strategy="eager"))


def test_short_trainings_make_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, (x, y) = vote.Wrapper(3)(mlp()), _rows(16)

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
        _train(mlp, vote.Wrapper(3))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert not made[0].replays
    assert "another mode" in made[0].off


def test_rows_on_another_device_than_the_model(made: list[TracedStep]) -> None:
    wrapped = vote.Wrapper(3)(mlp()).train()
    steps = TracedStep(wrapped, F.mse_loss, lambda batch: wrapped.loss(F.mse_loss, batch.x, batch.y))
    rows = Batch(None, *(part.to("meta") for part in _rows(16)))
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
    traced = _train(mlp, vote.Wrapper(4))
    assert made[0].replays > 20
    _assert_same(traced, _train(mlp, vote.Wrapper(4), strategy="eager"))


def test_without_knowing_what_packs_saved_tensors(made: list[TracedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Older torch can't tell: steps stay eager."""
    monkeypatch.setattr(traceable, "_TOP_HOOKS", None)
    trained = _train(mlp, vote.Wrapper(4))
    assert not made[0].replays
    _assert_same(trained, _train(mlp, vote.Wrapper(4), strategy="eager"))
