"""Files of calibrated and of abstaining models: loaded into a fresh model, they give identical answers to the last bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench
from workbench import compose, fit, load, save, sculpt, vote
from workbench.calibration import SplitConformal, calibrate, selective
from workbench.core.registry import OUTER, outer_class


def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.3 * torch.randn(n, 1, generator=generator)


def classes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = draw(n, seed)
    return x, (y[:, 0] > 0).long() + (y[:, 0] > 1).long()


HELD, LABELLED, NEW = draw(60, 0), classes(60, 0), draw(7, 1)[0]


def plain(seed: int, outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs))


def values() -> Any:
    return compose(vote.Wrapper(3), sculpt.Wrapper())(plain(0))


def scores() -> Any:
    return vote.Wrapper(3, output="logits")(plain(0, 3))


def crossed() -> Any:
    wrapped = values()
    history = fit(wrapped, draw(48, 3), folds=3, epochs=2, progress=False)
    return calibrate(wrapped, history)


def right(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long()


CALIBRATED: dict[str, Callable[[], Any]] = {
    "variance": lambda: calibrate(values(), HELD, "variance", per_output=True),
    "temperature": lambda: calibrate(scores(), LABELLED),
    "isotonic": lambda: calibrate(calibrate(values(), HELD, "variance"), HELD, "isotonic"),
    "intervals": lambda: calibrate(values(), HELD, "conformal"),
    "cqr": lambda: calibrate(values(), HELD, "conformal", score="cqr"),
    "sets": lambda: calibrate(scores(), LABELLED, "conformal", penalty=0.1),
    "sets by class": lambda: calibrate(scores(), LABELLED, "conformal", groups="class"),
    "intervals of scaled": lambda: calibrate(calibrate(values(), HELD, "variance"), HELD, "conformal"),
    "cross-fitted": crossed,
    "abstains": lambda: selective(calibrate(values(), HELD, "variance"), HELD).predictor(coverage=0.5),
    "compiled": lambda: calibrate(torch.compile(values(), backend="eager"), HELD, "variance"),
}


def answers(model: Any) -> list[Tensor]:
    """Everything that a model says about new rows."""
    outputs: list[Any] = []
    if type(model).__name__ == "SelectivePredictor":
        return list(model(NEW))
    y, risk = model(NEW, return_risk=True)
    outputs += [y, *(risk[name] for name in risk)] if isinstance(risk, workbench.Risk) else [y, risk]
    for ask in (model.interval, model.predict_set):
        try:
            said = ask(NEW, coverage=0.8)
        except (TypeError, ValueError):  # of another kind
            continue
        outputs += said if isinstance(said, tuple) else [said]
    return outputs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "compiled" else name for name in CALIBRATED]
)
def test_a_fresh_model_answers_alike(name: str, tmp_path: Path) -> None:
    calibrated = CALIBRATED[name]()
    save(calibrated, tmp_path / "model.safetensors")
    outputs = 3 if "sets" in name or name == "temperature" else 1
    again = load(tmp_path / "model.safetensors", plain(5, outputs))
    assert type(again) is type(calibrated)
    expected = answers(calibrated)
    assert len(expected) >= 2
    assert all(torch.equal(a, b) for a, b in zip(answers(again), expected, strict=True))
    assert [name for name, _ in again.named_buffers()] == [
        name.replace("_orig_mod.", "") for name, _ in calibrated.named_buffers()
    ]


def test_every_calibration_is_known_to_files() -> None:
    from workbench import calibration

    public = {name for name, cls in vars(calibration).items() if inspect.isclass(cls) and hasattr(cls, "arguments")}
    assert public - {"Calibrated"} == set(OUTER)
    for name in OUTER:
        assert outer_class(name) is getattr(calibration, name)


def test_functions_must_be_given_again(tmp_path: Path) -> None:
    calibrated = calibrate(values(), HELD, "conformal", groups=right, score="normalized")
    path = tmp_path / "model.safetensors"
    save(calibrated, path)
    with pytest.raises(
        ValueError, match=r"made with groups=, functions.* load\(path, SplitConformal\(wrapper\(model\)"
    ):
        load(path, plain(5))
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper())(plain(5))
    again = SplitConformal(wrapped, score="normalized", groups=right)
    assert load(path, again) is again
    assert all(map(torch.equal, answers(again), answers(calibrated)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda wrapped: calibrate(wrapped, HELD, "variance"),
            "SplitConformal of a wrapped model, and this is a VarianceScaling",
        ),
        (lambda wrapped: SplitConformal(wrapped, score="absolute"), "with the same options before loading"),
        (lambda wrapped: wrapped, None),
    ],
)
def test_another_calibration_is_refused_and_stays(make: Any, words: str | None, tmp_path: Path) -> None:
    save(calibrate(values(), HELD, "conformal"), tmp_path / "model.safetensors")
    model = make(compose(vote.Wrapper(3), sculpt.Wrapper())(plain(5)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if words is None:  # a wrapped model takes the calibration of the file
        assert isinstance(load(tmp_path / "model.safetensors", model), SplitConformal)
        return
    with pytest.raises(ValueError, match=words):
        load(tmp_path / "model.safetensors", model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_plain_file_does_not_load_into_a_calibrated_model(tmp_path: Path) -> None:
    save(values(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds a wrapped model, and this is a SplitConformal"):
        load(tmp_path / "model.safetensors", SplitConformal(values()))


def test_what_stands_around_must_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(calibrate(values(), HELD, "conformal"), tmp_path / "model.safetensors")
    monkeypatch.delitem(OUTER, "SplitConformal")
    with pytest.raises(ValueError, match="that this version of workbench does not know"):
        load(tmp_path / "model.safetensors", plain(5))
