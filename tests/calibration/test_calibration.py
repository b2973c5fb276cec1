"""What all calibration methods share: accepted forms of rows, copies, states, and errors for bad input."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers.calibration_models import answers_of, classified, known, labelled, regression, rng, scores
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import workbench
from workbench import compose, neo, sample, vote
from workbench.calibration import (
    QuantileRecalibration,
    SplitConformal,
    TemperatureScaling,
    VarianceScaling,
    calibrate,
)
from workbench.calibration.scaling import fit_temperature
from workbench.data import Split


class Pairs(Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


@pytest.mark.parametrize(
    "give",
    [
        lambda x, y: (x.numpy(), y.numpy()),
        TensorDataset,
        Pairs,
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True),
        lambda x, y: Split(x.float(), y.float()),
        lambda x, y: (x.float(), y),
    ],
    ids=["arrays", "TensorDataset", "Dataset", "DataLoader", "Split", "float32"],
)
def test_rows_come_in_many_forms(give: Any) -> None:
    x, y, _, _ = regression(40, factor=2.0)
    wrapped = known()
    random = torch.get_rng_state()
    scale = calibrate(wrapped, give(x, y), "variance").scale
    assert scale.item() == pytest.approx(calibrate(wrapped, (x, y), batch_size=3).scale.item(), rel=1e-5)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_of_several_inputs_is_calibrated() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.fc(a + b)

    wrapped = vote.Wrapper(3)(Sum())
    x, y = torch.randn(2, 20, 2, generator=rng()), torch.randn(20, 1, generator=rng(1))
    calibrated = calibrate(wrapped, ((x[0], x[1]), y))
    lower, upper = calibrated.interval((x[0], x[1]))
    torch.testing.assert_close((lower + upper) / 2, calibrated(x[0], x[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_calibrated_in_float32(dtype: torch.dtype) -> None:
    x, labels = classified()
    wrapped = vote.Wrapper(3, output="logits")(nn.Linear(4, 3)).to(dtype).eval()
    calibrated = calibrate(wrapped, (x, labels))
    assert calibrated.temperature.dtype == torch.float32
    assert calibrated(x.to(dtype)).dtype == dtype
    assert calibrated.temperature.item() == pytest.approx(
        fit_temperature(wrapped(x.to(dtype)).float(), labels), rel=1e-4
    )


def makers() -> dict[str, Any]:
    x, y, _, _ = regression(30, outputs=2)
    logits, labels = labelled(30, 2.0)
    return {
        "temperature": lambda: (calibrate(scores(output="logits"), (logits, labels)), logits),
        "variance": lambda: (calibrate(known(outputs=2), (x, y), per_output=True, method="variance"), x),
        "isotonic": lambda: (calibrate(known(outputs=2), (x, y), "isotonic"), x),
        "normalized": lambda: (calibrate(known(outputs=2), (x, y), "conformal"), x),
        "cqr": lambda: (calibrate(known(outputs=2), (x, y), "conformal", score="cqr", joint=True), x),
        "aps": lambda: (
            calibrate(scores(output="logits"), (logits, labels), "conformal", score="aps", randomized=False),
            logits,
        ),
        "chain": lambda: (calibrate(calibrate(known(outputs=2), (x, y)), (x, y), "conformal"), x),
    }


@pytest.mark.parametrize("name", makers())
@pytest.mark.parametrize("how", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_copies_answer_alike(name: str, how: Any) -> None:
    calibrated, x = makers()[name]()
    again = how(calibrated)
    assert again is not calibrated
    for mine, theirs in zip(answers_of(calibrated, x), answers_of(again, x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "fresh"),
    [
        ("temperature", lambda: TemperatureScaling(scores(output="logits"))),
        ("variance", lambda: VarianceScaling(known(outputs=2), per_output=True)),
        ("isotonic", lambda: QuantileRecalibration(known(outputs=2))),
        ("normalized", lambda: SplitConformal(known(outputs=2))),
        ("cqr", lambda: SplitConformal(known(outputs=2), "cqr", joint=True)),
        ("aps", lambda: SplitConformal(scores(output="logits"), "aps", randomized=False)),
        ("chain", lambda: SplitConformal(VarianceScaling(known(outputs=2)))),
    ],
)
def test_a_state_is_loaded_by_a_fresh_object(name: str, fresh: Any, tmp_path: Any) -> None:
    calibrated, x = makers()[name]()
    torch.save(calibrated.state_dict(), tmp_path / "state.pt")
    again = fresh().double().eval()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for mine, theirs in zip(answers_of(calibrated, x), answers_of(again, x), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_of_other_options_is_refused() -> None:
    calibrated, _ = makers()["normalized"]()
    other = SplitConformal(known(outputs=2), joint=True)
    with pytest.raises(ValueError, match=r"the state is of SplitConformal.*'joint': False.*this object.*'joint': True"):
        other.load_state_dict(calibrated.state_dict())
    assert not other.scores.numel()
    with pytest.raises(ValueError, match=r"the state is of SplitConformal.*this object is VarianceScaling"):
        VarianceScaling(known(outputs=2)).load_state_dict(calibrated.state_dict(), strict=False)


def test_it_moves_with_the_model() -> None:
    calibrated, x = makers()["variance"]()
    calibrated.float()
    assert calibrated.scale.dtype == torch.float32
    assert calibrated(x.float(), return_risk=True)[1].dtype == torch.float32


def test_models_that_are_not_wrapped_are_refused() -> None:
    with pytest.raises(TypeError, match="Linear is not wrapped: wrap it first"):
        calibrate(nn.Linear(2, 1), (torch.zeros(3, 2), torch.zeros(3, 1)))
    with pytest.raises(TypeError, match="found function; give a model wrapped"):
        calibrate(lambda x: x, (torch.zeros(3, 2), torch.zeros(3, 1)))  # type: ignore[arg-type]


def test_training_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="a Data holds training rows"):
        calibrate(known(), workbench.data.load("cubic", n_train=20))


@pytest.mark.parametrize(
    ("wrapped", "y", "method", "message"),
    [
        (known, torch.zeros(12, 1), "platt", "method must be one of temperature, variance"),
        (known, torch.zeros(12), "variance", r"targets have shape \[12\], predictions \[12, 1\].*y\[:, None\]"),
        (known, torch.zeros(12, 1), "temperature", "for classes, but the targets are values"),
        (known, torch.zeros(12, dtype=torch.int64), "variance", "for values, but the targets are class numbers"),
        (
            known,
            torch.zeros(12, dtype=torch.int64),
            "temperature",
            r"class numbers have shape \[12\], predictions \[12, 1\]",
        ),
        (known, torch.zeros(11, 1), None, "x has 12 rows and y has 11"),
        (known, torch.full((12, 1), torch.nan), None, "y holds NaN"),
        (known, torch.zeros(12, 1), "variance", "the prediction is exact in all 12 held-out numbers"),
        (
            lambda: compose()(nn.Linear(2, 1)),
            torch.ones(12, 1),
            "variance",
            r"gives none at all \(the plain baseline\)",
        ),
        (
            lambda: neo.Wrapper()(nn.Linear(2, 1)).fit(torch.randn(9, 2, generator=rng())),
            torch.ones(12, 1),
            "isotonic",
            "by='total': the model measures no such risk; it gives vacuitic",
        ),
        *(
            (
                lambda: sample.Wrapper(1)(nn.Linear(2, 1)),
                torch.ones(12, 1),
                method,
                r"total risk is 0 in 12 of 12 held-out values.*score='absolute'.*sculpt",
            )
            for method in ("variance", "isotonic")
        ),
    ],
)
def test_bad_input_is_refused(wrapped: Any, y: Tensor, method: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(wrapped(), (torch.zeros(12, 2), y), method)


@pytest.mark.parametrize("method", ["temperature", "variance", "isotonic"])
def test_too_few_rows_are_refused_with_how_many_are_needed(method: str) -> None:
    x, y, _, _ = regression(10)
    wrapped = known()
    if method == "temperature":
        (x, y), wrapped = labelled(10, 2.0), scores(output="logits")
    with pytest.raises(ValueError, match="needs at least 10 held-out rows, there are 9"):
        calibrate(wrapped, (x[1:], y[1:]), method)
    assert calibrate(wrapped, (x, y), method)(x).isfinite().all()


def test_labels_beyond_the_classes_and_empty_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="class numbers go from 0 to 3, but the model gives 3 scores"):
        calibrate(scores(output="logits"), (torch.zeros(2, 3), torch.tensor([0, 3])))
    with pytest.raises(ValueError, match="at least 10 held-out rows, there are 2"):  # rows without a class don't count
        calibrate(scores(output="logits"), (torch.zeros(12, 3), torch.tensor([0, 2, *[-100] * 10])))
    with pytest.raises(ValueError, match="there are no rows"):
        calibrate(known(), (torch.zeros(0, 2), torch.zeros(0, 1)))
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1; found 0"):
        calibrate(known(), (torch.zeros(2, 2), torch.zeros(2, 1)), batch_size=0)
    with pytest.raises(TypeError, match="'score'"):
        calibrate(known(), (torch.zeros(2, 2), torch.ones(2, 1)), "variance", score="aps")


def test_a_risk_that_is_not_finite_is_told() -> None:
    x, y, _, _ = regression(5)
    x[3] = 1e30  # whose square float32 cannot hold
    with pytest.raises(ValueError, match="risk is NaN or infinite in 1 of 5 rows, first in row 3"):
        calibrate(vote.Wrapper(3)(nn.Linear(2, 1)), (x.float(), y.float()))


def test_several_outputs_are_refused_with_a_hint() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(x), self.fc(-x)

    with pytest.raises(TypeError, match="gives a tuple; this needs exactly one tensor"):
        calibrate(vote.Wrapper(2)(Two()), (torch.zeros(3, 2), torch.zeros(3, 1)))


def test_answers_that_a_method_does_not_have_name_the_one_that_has() -> None:
    wrapped = vote.Wrapper(2, output="logits")(nn.Linear(2, 3))
    calibrated = calibrate(wrapped, (torch.zeros(30, 2), torch.arange(30) % 3))
    with pytest.raises(TypeError, match=r"TemperatureScaling gives no intervals; .*'conformal'"):
        calibrated.interval(torch.zeros(1, 2))
    with pytest.raises(TypeError, match=r"VarianceScaling gives no sets; .*'conformal'"):
        VarianceScaling(wrapped).predict_set(torch.zeros(1, 2))
