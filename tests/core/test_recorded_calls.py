"""Calls answered by a graph equal eager calls to the last bit; where they would not, no graph is used."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from helpers.recorded_calls import CALLS, as_ever, assert_same, batches, calls_of, record_early, wrapped_as
from helpers.threads import in_threads
from helpers.traced_models import EAGER, TRACED, Residual, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, neo, sample, sculpt, vote
from workbench.core.calls import recorded_calls
from workbench.errors import WorkbenchWarning
from workbench.outputs import Detections


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    record_early(monkeypatch)


class Two(nn.Module):
    """Several inputs, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return {"mean": self.net(x) + other, "parts": (self.net(other), self.net(x).exp())}


RECORDED = {
    **TRACED,
    "sample, normal": (mlp, sample.Wrapper(4, distribution=sample.Normal(0.1))),
    "sample, inputs": (mlp, sample.Wrapper(3, where="inputs", distribution=sample.Normal(0.1))),
    "sample x sculpt": (mlp, compose(sample.Wrapper(4), sculpt.Wrapper())),
    "neo, gaussian": (mlp, neo.Wrapper(density="gaussian")),
    "all": (mlp, compose(vote.Wrapper(3), sculpt.Wrapper(), neo.Wrapper())),
    "laplace distribution": (mlp, sculpt.Wrapper(sculpt.Laplace)),
    "quantiles": (mlp, sculpt.Wrapper(sculpt.Quantiles((0.1, 0.9)))),
    "binary": (mlp, vote.Wrapper(3, output="binary")),
    "logits": (lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)), vote.Wrapper(3, output="logits")),
}
RECORDED = {name: row for name, row in RECORDED.items() if not name.endswith(", loop")}  # where a strategy was chosen


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
def test_recorded_calls_are_the_same(name: str, frozen: bool) -> None:
    """Also the global random state after each."""
    build, wrapper = RECORDED[name]
    wrapped, other = wrapped_as(build, wrapper), wrapped_as(build, wrapper)
    calls_of(other).off = "as ever"
    answers: list[Any] = []

    def ask(model: Any) -> list[Any]:
        torch.manual_seed(2)
        out = []
        for i, x in enumerate(batches()):
            out += [model(x), model(x, return_risk=True), torch.get_rng_state()] if i % 2 else [model(x + 1)]
        return out

    with torch.no_grad():
        if frozen:
            with wrapped.frozen():
                answers = ask(wrapped)
        else:
            answers = ask(wrapped)
        assert_same(answers, ask(other))
    assert calls_of(wrapped).off == ""
    assert calls_of(wrapped).replays > 10
    assert f"{calls_of(wrapped).replays} calls were answered by a graph" in wrapped.explain()


# those left out differ in training only
@pytest.mark.parametrize("name", [*sorted(EAGER.keys() - {"momentum none", "LSTM"}), "loop"])
def test_what_is_not_sure_to_repeat_is_left_alone(name: str) -> None:
    build, wrapper = (EAGER[name], vote.Wrapper(3)) if name in EAGER else (mlp, vote.Wrapper(3, strategy="loop"))
    wrapped = wrapped_as(build, wrapper)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", WorkbenchWarning)
        for x in batches():
            try:
                wrapped(x.clone(), return_risk=True)
            except Exception:  # refused as ever
                continue
    assert calls_of(wrapped).replays == 0


@pytest.mark.slow
def test_several_inputs_and_outputs() -> None:
    wrapped = wrapped_as(Two)
    with torch.no_grad():
        for x in batches():
            assert_same(
                wrapped(x, x[:, :1] @ torch.ones(1, 3)[:, :3]), as_ever(wrapped, x, x[:, :1] @ torch.ones(1, 3))
            )
        for x in batches():  # once the same tensor twice, which is another kind of call
            assert_same(wrapped(x, x, return_risk=True), as_ever(wrapped, x, x, return_risk=True))


class Optional(nn.Module):
    """Inputs that may be given by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        x = x if shift is None else x + shift
        return self.net(x if scale is None else x * scale)


@pytest.mark.slow
def test_inputs_given_by_keyword() -> None:
    """Other keywords are another kind of call, also if their tensors have the same shapes."""
    wrapped = wrapped_as(Optional)
    with torch.no_grad():
        for x in batches():
            for kwargs in ({"shift": x + 1}, {"scale": x + 1}, {"scale": x, "shift": x + 2}):
                assert_same(wrapped(x, return_risk=True, **kwargs), as_ever(wrapped, x, return_risk=True, **kwargs))
            assert_same(wrapped(shift=x + 1, x=x), as_ever(wrapped, x, x + 1))
            assert_same(wrapped(x=x, shift=x + 1), as_ever(wrapped, x, x + 1))
    assert calls_of(wrapped).off == ""
    assert calls_of(wrapped).replays > 50


def test_an_unknown_keyword_is_refused_after_a_graph() -> None:
    wrapped, x = wrapped_as(Optional), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x, shift=x)
        with pytest.raises(TypeError, match="other"):
            wrapped(x, other=x)


def test_risk_is_recorded_without_writes() -> None:
    """A graph in which an operation writes in place could not be simplified."""
    wrapped, x = wrapped_as(mlp), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x, return_risk=True)
    graphs = [kind.recorded.graph for kind in calls_of(wrapped)._kinds.values() if kind.recorded is not None]
    assert [graph.writes for graph in graphs] == [False]


def test_dealt_rows_are_drawn_anew() -> None:
    wrapped, x = wrapped_as(mlp, vote.Wrapper(2)), torch.ones(8, 3)
    with torch.no_grad():
        dealt = torch.stack([wrapped(x, tile_and_reduce=False) for _ in range(CALLS)])
    assert len(dealt.flatten(1).unique(dim=0)) > CALLS // 2
    assert calls_of(wrapped).replays == 0


class Boxes(nn.Module):
    """As many boxes for each input, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.score = nn.Linear(3, 4), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        corners = self.net(x)
        return {
            "boxes": torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:].exp()], 1),
            "scores": self.score(x).sigmoid()[:, 0],
            "labels": torch.ones(x.shape[0], dtype=torch.int64),
        }


def test_boxes_are_matched_anew() -> None:
    wrapped = wrapped_as(Boxes, vote.Wrapper(3, output=Detections("boxes", "scores", "labels")))
    with torch.no_grad():
        for x in batches():
            assert_same(wrapped(x), as_ever(wrapped, x))
    assert calls_of(wrapped).replays == 0


def test_recorded_calls_follow_changed_units() -> None:
    wrapped = wrapped_as(mlp)
    wrapped.scale(x_mean=1.0, x_scale=2.0, y_mean=3.0, y_scale=4.0)
    with torch.no_grad():
        for x in batches():
            assert_same(wrapped(x, return_risk=True), as_ever(wrapped, x, return_risk=True))
        assert calls_of(wrapped).replays > 10
        wrapped.scale(y_mean=0.0, y_scale=1.0)
        assert_same(wrapped(x, return_risk=True), as_ever(wrapped, x, return_risk=True))


@pytest.mark.slow
def test_other_forms_are_other_calls() -> None:
    wrapped = wrapped_as(mlp)
    with torch.no_grad():
        for x in batches(12):
            for other in (x, x[:2], x.t().contiguous().t(), x[::2], x[0], x.view(1, 5, 3)):
                assert_same(wrapped(other, return_risk=True), as_ever(wrapped, other, return_risk=True))
        assert calls_of(wrapped).replays > 10
        wrapped.double()
        for x in batches(8):
            assert_same(wrapped(x.double(), return_risk=True), as_ever(wrapped, x.double(), return_risk=True))
    assert calls_of(wrapped).replays


def test_held_noise_stays() -> None:
    wrapped, x = wrapped_as(mlp, sample.Wrapper(4)), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x)
        with sample.hold_noise(wrapped):
            assert torch.equal(wrapped(x), wrapped(x))
        assert not torch.equal(wrapped(x), wrapped(x))


def test_nan_is_told_once() -> None:
    wrapped, x = wrapped_as(mlp), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x, return_risk=True)
        bad = x.clone()
        bad[0] = torch.nan
        with pytest.warns(WorkbenchWarning, match="the risk is NaN in some rows; 1 rows of the input"):
            y, _ = wrapped(bad, return_risk=True)
        assert y.isnan().any(1).tolist() == [True, False, False, False, False]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped(bad, return_risk=True)


def test_answers_are_the_callers_own() -> None:
    wrapped, x = wrapped_as(mlp), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            first = wrapped(x, return_risk=True)
        kept = [tensor.clone() for tensor in first]
        for tensor in wrapped(x, return_risk=True):
            tensor.zero_()
        assert_same(first, kept)
        assert_same(wrapped(x, return_risk=True), kept)


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), x


def test_an_output_that_is_an_input_is_left_alone() -> None:
    wrapped, x = wrapped_as(Passing, sculpt.Wrapper()), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            _, same = wrapped(x)
            assert same.data_ptr() == as_ever(wrapped, x)[1].data_ptr()


def test_a_difference_ends_it_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody looks at: a function inside torch."""
    wrapped, x = wrapped_as(lambda: mlp(nn.GELU())), batches()[0]
    gelu = F.gelu
    with torch.no_grad():
        for _ in range(12):
            wrapped(x)
        monkeypatch.setattr(F, "gelu", lambda h, approximate: 2 * gelu(h))
        with pytest.warns(WorkbenchWarning, match="something outside of the model"):
            answers = [wrapped(x) for _ in range(CALLS)]
        assert_same(answers[-1], as_ever(wrapped, x))
    assert calls_of(wrapped).off


@pytest.mark.slow
def test_a_model_that_changes_again_and_again_is_recorded_anew() -> None:
    wrapped, x = wrapped_as(Residual), batches()[0]
    with torch.no_grad():
        for scale in (1.0, 2.0, 3.0):
            wrapped.scale = scale
            for _ in range(CALLS):
                assert_same(wrapped(x), as_ever(wrapped, x))
    assert calls_of(wrapped).replays > 20


def test_threads_get_right_answers() -> None:
    wrapped, inputs = wrapped_as(mlp), batches(10)
    with torch.no_grad():
        expected = [as_ever(wrapped, x, return_risk=True) for x in inputs]

    def serve() -> None:
        with torch.no_grad():
            for _ in range(5):
                for x, right in zip(inputs, expected, strict=True):
                    assert_same(wrapped(x, return_risk=True), right)

    in_threads(serve, 3)


def test_a_recorded_model_goes_away() -> None:
    wrapped, x = wrapped_as(mlp), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            wrapped(x)
    gone = weakref.ref(next(wrapped.parameters()))
    del wrapped
    gc.collect()
    assert gone() is None


def test_a_comparison_that_finds_no_memory_ends_the_graph_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(recorded_calls, "Verdict", without_memory)
    wrapped, x = wrapped_as(mlp), batches()[0]
    with torch.no_grad():
        for _ in range(CALLS):
            assert_same(wrapped(x, return_risk=True), as_ever(wrapped, x, return_risk=True))
    assert calls_of(wrapped).replays == 0


# ---- when a graph is made
def _made_after(wrapped: Any, shape: tuple[int, ...]) -> int:
    """How many calls of a form are taken before a graph is made for it."""
    kinds = calls_of(wrapped)
    before = kinds._made
    for n in range(1, 40):
        with torch.no_grad():
            wrapped(torch.ones(shape), return_risk=True)
        if kinds._made > before:
            return n
    return 0


def test_short_calls_are_recorded_soon_and_those_in_many_forms_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_calls, "MIN_CALLS", 15)
    monkeypatch.setattr(recorded_calls, "SHORT_SECONDS", 1e9)
    wrapped = wrapped_as(mlp)
    assert [_made_after(wrapped, (rows, 3)) for rows in range(1, 7)] == [2, 2, 2, 2, 16, 16]


def test_long_calls_are_recorded_when_they_have_come_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_calls, "MIN_CALLS", 15)
    monkeypatch.setattr(recorded_calls, "SHORT_SECONDS", 0.0)
    assert _made_after(wrapped_as(mlp), (5, 3)) == 16
