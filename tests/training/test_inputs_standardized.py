"""Standardization of inputs in `fit`: several inputs, bytes, booleans, integers, masks, half precision."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import workbench
from workbench import WorkbenchWarning, augment, compose, fit, neo, vote


def quiet(wrapped: Any, data: Any, **settings: Any) -> Any:
    return fit(wrapped, data, **{"epochs": 2, "progress": False, **settings})


class Two(nn.Module):
    """Reads a [n, 2], b [n, 3], and tokens and a mask if it gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.embedding = nn.Linear(5, 1), nn.Embedding(7, 5)

    def forward(self, a: Tensor, b: Tensor, tokens: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h = torch.cat([a, b], 1)
        if tokens is not None:
            h = h + self.embedding(tokens).mean(1)
        return self.net(h if mask is None else h.masked_fill(~mask, 0.0) if mask.dtype == torch.bool else h * mask)


class Items(Two):
    """The same, of one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(**batch)


def pair(n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    a, b = 1000 + 100 * torch.randn(n, 2), torch.rand(n, 3)
    return a, b, (a[:, :1] - 1000) / 100 + b[:, :1]


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0, correction=0)


# ---- several inputs --------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[type[Two], Callable[[Tensor, Tensor], Any]]] = {
    "tuple": (Two, lambda a, b: (a, b)),
    "dict": (Two, lambda a, b: {"b": b, "a": a}),
    "one dict": (Items, lambda a, b: {"a": a, "b": b}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_each_floating_input_is_standardized_by_column_however_it_is_given(form: str, tmp_path: Path) -> None:
    cls, shape = FORMS[form]
    a, b, y = pair()
    wrapped: Any = compose()(cls())
    quiet(wrapped, (shape(a, b), y), validation=0)
    net = wrapped.net
    expected = net(torch.cat([standard(a), standard(b)], 1)) * y.std(correction=0) + y.mean()
    calls = {
        "one dict": [lambda m: m({"a": a, "b": b})],
    }.get(form, [lambda m: m(a, b), lambda m: m(a, b=b), lambda m: m(b=b, a=a)])
    workbench.save(wrapped, tmp_path / "model.safetensors")
    other: Any = compose()(cls())
    other.load_state_dict(wrapped.state_dict())
    loaded = workbench.load(tmp_path / "model.safetensors", cls())
    for model in (wrapped, copy.deepcopy(wrapped), other.eval(), loaded.eval(), wrapped.unwrap(), wrapped.voters()[0]):
        for call in calls:
            assert torch.allclose(call(model), expected, rtol=1e-4, atol=1e-4)
    if form != "one dict":
        program = torch.export.export(wrapped, (a, b))
        assert torch.allclose(program.module()(a, b), expected, rtol=1e-4, atol=1e-4)
        for dynamic in (None, True):  # True makes all sizes symbols, those of mean and scale as well
            compiled = torch.compile(wrapped, backend="eager", fullgraph=True, dynamic=dynamic)
            assert torch.allclose(compiled(a, b), expected, rtol=1e-4, atol=1e-4)


def test_a_single_input_is_standardized_also_by_name() -> None:
    class Named(nn.Linear):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features)

    a, _, y = pair()
    wrapped: Any = vote.Wrapper(2)(Named(2, 1))
    quiet(wrapped, (a, y))
    assert torch.equal(wrapped(features=a), wrapped(a))


def test_whole_numbers_and_masks_stay_as_they_are() -> None:
    a, b, y = pair()
    tokens, keep = torch.randint(7, (40, 4)), torch.rand(40, 5) < 0.8
    for mask in (keep, keep.float()):
        wrapped: Any = compose()(Two())
        quiet(wrapped, ({"a": a, "b": b, "tokens": tokens, "mask": mask}, y), validation=0)
        assert set(wrapped.scaling._named_buffers) == {"a", "b"}
        h = torch.cat([standard(a), standard(b)], 1) + wrapped.embedding(tokens).mean(1)
        expected = wrapped.net(h * keep) * y.std(correction=0) + y.mean()
        assert torch.allclose(wrapped(a, b, tokens, mask), expected, rtol=1e-4, atol=1e-4)


def test_infinite_masks_stay_as_they_are() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.fc(x) * mask.softmax(1)[:, :1]

    a, _, y = pair()
    mask = torch.randn(40, 3).masked_fill(torch.rand(40, 3) < 0.3, -torch.inf)
    mask[:, 0] = 0
    wrapped: Any = compose()(Attends())
    quiet(wrapped, ((a, mask), y))
    assert set(wrapped.scaling._named_buffers) == {0}


def test_constant_columns_keep_their_scale_and_nan_is_refused_before_anything_is_changed() -> None:
    a, b, y = pair()
    b[:, 0] = 3
    wrapped: Any = compose()(Two())
    quiet(wrapped, ((a, b), y), validation=0)
    assert wrapped.scaling._buffers["x_scale[1]"][0] == 1
    b[5, 1] = torch.nan
    fresh: Any = compose()(Two())
    before = copy.deepcopy(fresh.state_dict())
    for x in ((a, b), {"a": a, "b": b}):
        with pytest.raises(ValueError, match=r"NaN.*row 5"):
            quiet(fresh, (x, y))
    assert fresh.scaling is None
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in before.items())


def test_columns_of_targets_beside_the_predicted_one_are_not_standardized() -> None:
    """Such as weights of rows, which would be standardized too, and predictions repeated for each column."""
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    weights = torch.rand(40, 1) + 0.5

    def weighted(prediction: Tensor, target: Tensor) -> Tensor:
        return (target[:, 1:] * (prediction - target[:, :1]) ** 2).mean()

    wrapped: Any = vote.Wrapper(2)(nn.Linear(3, 1))
    start = copy.deepcopy(wrapped.state_dict())
    rows = x, torch.cat([y, weights], 1)
    with pytest.raises(ValueError, match=r"standardize: each of the 2 columns of y .* the model gives \[\d+, 1\]"):
        quiet(wrapped, rows, epochs=1, criterion=weighted, standardize=True)
    assert all(torch.equal(value, start[key]) for key, value in wrapped.state_dict().items())
    quiet(wrapped, rows, epochs=1, criterion=weighted)  # in their units
    assert wrapped.scaling is None or wrapped.scaling.y_mean is None
    assert wrapped(x).shape == (40, 1)


def test_half_precision_inputs_are_standardized_like_others() -> None:
    a, b, y = pair()
    for dtype in (torch.float16, torch.bfloat16):
        wrapped: Any = compose()(Two())
        quiet(wrapped, ((a.to(dtype), b), y), validation=0)
        rounded = a.to(dtype).float()
        expected = wrapped.net(torch.cat([standard(rounded), standard(b)], 1)) * y.std(correction=0) + y.mean()
        assert torch.allclose(wrapped(rounded, b), expected, rtol=1e-3, atol=1e-3)


def test_folds_standardize_a_tuple_too() -> None:
    a, b, y = pair()
    wrapped: Any = vote.Wrapper(2)(Two())
    quiet(wrapped, ((a, b), y), folds=2)
    assert set(wrapped.scaling._named_buffers) == {0, 1}
    assert wrapped(a, b).isfinite().all()


def test_outputs_beside_the_values_keep_their_units() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.body(x)
            y = self.head(h)
            return {"y": y, "hidden": h, "loss": y.square().mean(), "kind": (y > 0).long()}

    x, y = torch.randn(40, 2), 100 + torch.randn(40, 1)
    wrapped: Any = vote.Wrapper(2)(Beside())
    quiet(wrapped, (x, y), standardize=True, criterion=lambda out, y: (out["y"] - y).square().mean(), validation=0)
    plain = []
    for voter in wrapped.voters():
        voter.unscale()
        plain.append(voter(standard(x)))
    out, risk = wrapped(x, return_risk=True)
    for name in ("hidden", "loss"):
        assert torch.allclose(out[name], torch.stack([p[name] for p in plain]).mean(0), atol=1e-4)
    values = torch.stack([p["y"] for p in plain]) * y.std(correction=0) + y.mean()
    assert torch.allclose(out["y"], values.mean(0), rtol=1e-4)
    assert torch.allclose(risk["y"], values.std(0, correction=0), rtol=1e-3, atol=1e-3)
    assert torch.allclose(risk["hidden"], torch.stack([p["hidden"] for p in plain]).std(0, correction=0), atol=1e-4)


# ---- bytes, truth values, whole numbers ------------------------------------------------------------------------------


def classifier() -> Any:
    return compose(neo.Wrapper(output="logits"))(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    )


IMAGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda x, y: (x, y),
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "dataset": lambda x, y: TensorDataset(x, y),
    "rows": lambda x, y: ConcatDataset([TensorDataset(x, y)]),
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=16),
}


@pytest.mark.parametrize("form", IMAGES)
@pytest.mark.parametrize("standardize", [None, False])
def test_bytes_are_scaled_and_told_once(form: str, standardize: bool | None) -> None:
    x, y = torch.randint(0, 256, (64, 1, 4, 4), dtype=torch.uint8), torch.randint(0, 3, (64,))
    wrapped = classifier()
    settings = {"standardize": standardize, "validation": 0}
    with pytest.warns(WorkbenchWarning, match=r"uint8.*whenever") as caught:
        quiet(wrapped, IMAGES[form](x, y), **settings)
    assert len(caught) == 1
    seen = form in ("tensor", "numpy", "dataset") and standardize is None
    mean, scale = (x.float().mean(), x.float().std(correction=0)) if seen else (0.0, 255.0)
    logits, risk = wrapped(x, return_risk=True)
    plain = wrapped.unwrap()
    plain.unscale()
    assert torch.allclose(logits, plain((x.float() - mean) / scale), atol=1e-5)
    assert getattr(risk, "vacuitic", risk).shape == (64,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(wrapped, IMAGES[form](x, y), **settings)


def test_bytes_and_floats_are_not_confused(tmp_path: Path) -> None:
    x, y = torch.randint(0, 256, (64, 1, 4, 4), dtype=torch.uint8), torch.randint(0, 3, (64,))
    wrapped = classifier()
    with pytest.warns(WorkbenchWarning, match="uint8"):
        quiet(wrapped, (x, y))
    workbench.save(wrapped, tmp_path / "model.safetensors")
    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    loaded = workbench.load(tmp_path / "model.safetensors", plain)
    assert torch.equal(loaded.eval()(x), wrapped(x))
    for model in (wrapped, loaded, copy.deepcopy(wrapped).double()):
        with pytest.raises(TypeError, match=r"is torch.float32.*trained on torch.uint8"):
            model(x / 255)
    other = classifier()
    quiet(other, (x / 255, y))
    with pytest.raises(TypeError, match=r"is torch.uint8.*trained on floating-point"):
        other(x)


def test_bytes_that_a_model_takes_stay_bytes() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.uint8
            return self.fc(x.flatten(1) / 255)

    wrapped: Any = compose()(Scales())
    quiet(wrapped, (torch.randint(0, 256, (64, 1, 4, 4), dtype=torch.uint8), torch.randint(0, 3, (64,))))
    assert wrapped.scaling is None


def test_truth_values_become_zero_and_one() -> None:
    x, y = torch.rand(64, 4) < 0.3, torch.randn(64, 1)
    wrapped: Any = vote.Wrapper(2)(nn.Linear(4, 1))
    quiet(wrapped, (x.numpy(), y.numpy()), validation=0)
    outs = torch.stack([nn.functional.linear(x.float(), *(p[i] for p in wrapped.parameters())) for i in range(2)])
    assert torch.allclose(wrapped(x), outs.mean(0) * y.std(correction=0) + y.mean(), atol=1e-5)


def test_bytes_among_other_inputs() -> None:
    a, b, y = pair()
    tokens, mask = torch.randint(7, (40, 4)), torch.rand(40, 5) < 0.8
    pixels = (255 * b).byte()

    class Multiplies(Two):
        def forward(self, a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(a, b @ torch.eye(3), *rest)  # torch.cat would take bytes as they are

    wrapped: Any = compose()(Multiplies())
    with pytest.warns(WorkbenchWarning, match=r"x\[1\] is uint8"):
        quiet(wrapped, ((a, pixels, tokens, mask), y), validation=0)
    h = torch.cat([standard(a), standard(pixels.float())], 1) + wrapped.embedding(tokens).mean(1)
    expected = wrapped.net(h * mask) * y.std(correction=0) + y.mean()
    assert torch.allclose(wrapped(a, pixels, tokens, mask), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("x", [torch.randint(9, (40, 4)), np.arange(160).reshape(40, 4)])
def test_whole_numbers_that_a_model_does_not_take_are_refused(x: Any) -> None:
    wrapped: Any = compose()(nn.Linear(4, 1))
    with pytest.raises(TypeError, match=r"x is torch.int64.*x\.float\(\)"):
        quiet(wrapped, (x, torch.randn(40, 1)))
    assert wrapped.scaling is None


def test_what_fails_for_another_reason_says_so() -> None:
    wrapped: Any = compose()(nn.Linear(4, 1))
    with pytest.raises(RuntimeError, match="shape"):
        quiet(wrapped, (torch.zeros(40, 5), torch.randn(40, 1)))


def test_a_frozen_model_is_not_given_bytes_of_another_scale() -> None:
    wrapped = neo.Wrapper()(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).requires_grad_(False))
    with pytest.raises(TypeError, match=r"uint8.*frozen"):
        quiet(wrapped, (torch.zeros(40, 1, 4, 4, dtype=torch.uint8), torch.randint(0, 3, (40,))))


def test_augment_turns_bytes() -> None:
    x, y = torch.randint(0, 256, (64, 1, 4, 4), dtype=torch.uint8), torch.randint(0, 3, (64,))
    wrapped: Any = augment.Wrapper("flips", output="logits")(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    with pytest.warns(WorkbenchWarning, match="uint8"):
        quiet(wrapped, (x, y))
    assert (wrapped(x, return_risk=True)[1].total > 0).all()


class MeanOverLength(nn.Module):
    """The mean of the steps up to a relative length, as many models of speech take it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        kept = torch.arange(x.shape[1]) < (length * x.shape[1])[:, None]
        return self.fc((x * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


def test_a_loss_that_is_not_finite_on_standardized_inputs_names_the_remedy() -> None:
    """A relative length that is moved to mean 0 leaves no step."""
    generator = torch.Generator().manual_seed(0)
    x, length, y = (
        torch.randn(32, 4, 3, generator=generator),
        torch.linspace(0.3, 1, 32),
        torch.randn(32, 1, generator=generator),
    )
    with pytest.raises(FloatingPointError, match="standardize=False if an input must keep its units, such as a length"):
        fit(vote.Wrapper(2)(MeanOverLength()), ((x, length), y), epochs=1, progress=False)
    fit(vote.Wrapper(2)(MeanOverLength()), ((x, length), y), epochs=1, progress=False, standardize=False)
