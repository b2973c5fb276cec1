"""A model's own attributes win over those of `Wrapped`; nothing in the library depends on the latter, and errors say how to reach them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import NotFittedError, Wrapped, compose, diagnose, experiments, load, neo, save, sculpt, vote
from workbench.core.wrapped import PUBLIC

X, Y = torch.randn(12, 3), torch.randn(12, 1)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Detector(Plain):
    def loss(self, batch: dict[str, Tensor], preds: Tensor | None = None) -> Tensor:
        return (self(batch["x"]) if preds is None else preds).square().mean()

    def fit(self, batch: Tensor) -> Detector:
        return self


class Masked(Plain):
    def loss(self, y: Tensor, y_hat: Tensor, mask: Tensor) -> Tensor:
        return ((y - y_hat) * mask).square().mean()


class HoldsLoss(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.MSELoss()
        self.fit = "least squares"


@pytest.mark.parametrize(
    ("cls", "signature"),
    [
        (Detector, "loss(self, batch: 'dict[str, Tensor]', preds: 'Tensor | None' = None) -> 'Tensor'"),
        (Masked, "loss(self, y: 'Tensor', y_hat: 'Tensor', mask: 'Tensor') -> 'Tensor'"),
    ],
)
def test_a_failed_call_of_the_models_method_says_how_to_reach_that_of_workbench(cls: Any, signature: str) -> None:
    wrapped = vote.Wrapper(2)(cls())
    with pytest.raises(TypeError) as caught:
        wrapped.loss(nn.MSELoss(), X, Y)
    assert caught.value.__notes__ == [
        f"loss of this wrapped {cls.__name__} is its own method {signature}; that of workbench is called by "
        "workbench.Wrapped.loss(wrapped, criterion, x, y)"
    ]
    assert Wrapped.loss(wrapped, nn.MSELoss(), X, Y).isfinite()


def test_errors_of_the_models_own_calls_stay_as_they_are() -> None:
    wrapped = vote.Wrapper(2)(Detector())
    assert wrapped.loss({"x": X}) >= 0
    with pytest.raises(KeyError) as caught:
        wrapped.loss({"y": X})
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(("cls", "member"), [(Detector, "method fit(self, "), (HoldsLoss, "attribute fit")])
def test_an_error_that_asks_for_a_hidden_method_says_how_to_call_it(cls: Any, member: str) -> None:
    wrapped = neo.Wrapper()(cls()).eval()
    with pytest.raises(NotFittedError, match=r"wrapped\.fit\(loader\)") as caught:
        wrapped(X, return_risk=True)
    (note,) = caught.value.__notes__
    assert note.startswith(f"fit of this wrapped {cls.__name__} is its own {member}")
    assert note.endswith("that of workbench is called by workbench.Wrapped.fit(wrapped, inputs)")
    Wrapped.fit(wrapped, X)
    assert wrapped(X, return_risk=True)[1].isfinite().all()


def test_errors_name_the_usual_call_where_nothing_is_hidden() -> None:
    with pytest.raises(NotFittedError) as caught:
        neo.Wrapper()(Plain()).eval()(X, return_risk=True)
    assert not hasattr(caught.value, "__notes__")


def hiding(base: Any) -> Any:
    """A subclass whose own methods have all public names of `Wrapped`."""

    def unexpected(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a method of the user's was called")

    return type(base.__name__, (base,), dict.fromkeys(PUBLIC, unexpected))


def test_explanations_and_diagnoses_do_not_call_the_models_methods() -> None:
    for wrapper in (compose(vote.Wrapper(2), sculpt.Wrapper()), neo.Wrapper()):
        hidden, usual = wrapper(hiding(Plain)()), wrapper(Plain())
        lines = str(Wrapped.explain(hidden)).splitlines()
        names = f"the model's own: {', '.join(sorted(PUBLIC))}; those of workbench are workbench.Wrapped.base_parameters and so on"
        assert [line for line in lines if line.strip() != names] == str(usual.explain()).splitlines()
        assert len(lines) == len(str(usual.explain()).splitlines()) + 1
    assert diagnose(hiding(Plain)(), (X,)).verdicts == diagnose(Plain(), (X,)).verdicts


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1)).unflatten(1, (1, 2))


def test_back_tests_do_not_depend_on_the_models_names() -> None:
    series = torch.randn(40, 2) * torch.tensor([1.0, 100.0]) + 50

    def forecasts(cls: Any) -> Any:
        torch.manual_seed(0)
        wrapped = compose(vote.Wrapper(2), sculpt.Wrapper())(cls())
        options: dict[str, Any] = {"window": 4, "start": 36, "refit": 9, "paths": 2, "epochs": 1, "progress": False}
        return experiments.backtest(wrapped, series, **options)

    hidden, usual = forecasts(hiding(Forecaster)), forecasts(Forecaster)
    assert torch.equal(hidden.prediction, usual.prediction)
    assert torch.equal(hidden.paths, usual.paths)


def test_folders_do_not_depend_on_the_models_names(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    model = hiding(transformers.BertForSequenceClassification)(config)
    wrapped = vote.Wrapper(2, output={"logits": "logits"})(model).eval()
    wrapped.save_pretrained(tmp_path)
    assert "- Voters: 2" in (tmp_path / "README.md").read_text()


class Lists(Plain):
    """Has its own way of listing parameters, as loss modules of torchrl do."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return super().named_parameters(prefix, recurse)


def test_a_model_may_list_its_parameters_with_fewer_arguments(tmp_path: Path) -> None:
    for wrapper in (vote.Wrapper(3, share=1), sculpt.Wrapper(), neo.Wrapper()):
        wrapped: Any = wrapper(Lists()).eval()
        save(wrapped, tmp_path / "model.safetensors")
        assert torch.equal(load(tmp_path / "model.safetensors", Lists()).eval()(X), wrapped(X))
    voters: Any = vote.Wrapper(3)(Lists()).eval()
    torch.testing.assert_close(voters(X), torch.stack([voter(X) for voter in voters.voters()]).mean(0))
    assert diagnose(Lists(), (X,)).verdicts == diagnose(Plain(), (X,)).verdicts
