"""Laplace in half precision: variances as in float32 for the rounded features."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import laplace
from workbench.outputs import Logits

NOISE, PRIOR = 0.01, 1.0
PRECISIONS = ["autocast", "bfloat16", "float16", "fitted in bfloat16"]


class Net(nn.Module):
    """Wide enough for directions that the training data settle, and others that they don't."""

    def __init__(self, tail: Any = lambda y: y) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.last, self.tail = nn.Linear(64, 3), tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.last(self.body(x)))


def rows(n: int, seed: int) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def fitted(output: Any, precision: str, tail: Any = lambda y: y) -> tuple[Any, Any, torch.dtype]:
    """The wrapped model, the plain one, and the dtype of the inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = Net(tail)
    dtype = {"autocast": torch.float32, "float16": torch.float16}.get(precision, torch.bfloat16)
    wrapper = laplace.Wrapper(None, PRIOR, None if output else NOISE, output=output)
    if precision.startswith("fitted"):
        plain = plain.to(dtype)
    wrapped = wrapper(copy.deepcopy(plain)).eval().fit([(rows(2000, 0).to(next(plain.parameters()).dtype), None)])
    return wrapped.to(dtype), plain.to(dtype), dtype


def asked(wrapped: Any, x: Tensor, precision: str) -> Any:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        return wrapped(x, return_risk=True)


def features(plain: Any, x: Tensor, precision: str) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        h = plain.body(x).double()
    return torch.cat([h, torch.ones(len(h), 1).double()], 1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_standard_deviation_of_values_is_that_of_the_dense_posterior(precision: str) -> None:
    wrapped, plain, dtype = fitted(None, precision)
    x = rows(50, 1).to(dtype)
    y, risk = asked(wrapped, x, precision)
    # the posterior is that of the precision in which it was fitted
    source = plain if precision.startswith("fitted") else fitted(None, "autocast")[1]
    phi = features(source, rows(2000, 0).to(next(source.parameters()).dtype), "")
    covariance = torch.linalg.inv(phi.T @ phi / NOISE**2 + PRIOR * torch.eye(65).double())
    new = features(plain, x, precision)
    expected = ((new @ covariance) * new).sum(1).sqrt()
    assert risk.dtype is torch.float32
    torch.testing.assert_close(risk.double(), expected[:, None].expand(50, 3), rtol=2e-3, atol=0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        prediction = plain(x)
    assert y.dtype is prediction.dtype
    torch.testing.assert_close(y, prediction, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_entropies_of_classes_are_those_of_draws_in_float64(precision: str) -> None:
    wrapped, plain, dtype = fitted("logits", precision)
    x = rows(50, 1).to(dtype)
    y, risk = asked(wrapped, x, precision)
    source = plain if precision.startswith("fitted") else fitted("logits", "autocast")[1]
    seen = rows(2000, 0).to(next(source.parameters()).dtype)
    phi, p = features(source, seen, ""), source(seen).detach().float().softmax(-1).double()
    fisher = torch.stack([torch.diag(row) - row[:, None] * row for row in p]).mean(0)
    covariance = torch.linalg.inv(torch.kron(fisher, phi.T @ phi) + PRIOR * torch.eye(3 * 65))
    at = [torch.kron(torch.eye(3).double(), row[None]) for row in features(plain, x, precision)]
    # which draws there are is the wrapper's own; that their axes are those of the curvature is checked
    state = wrapped.state_dict()
    axes, points = (state[f"last.weight@laplace_{part}"].double() for part in ("mixing", "points"))
    curvature = axes.T @ fisher @ axes
    torch.testing.assert_close(curvature, curvature.diagonal().diag(), rtol=0, atol=1e-6)
    deviations = torch.stack([(axes.T @ (a @ covariance @ a.T) @ axes).diagonal().sqrt() for a in at])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        logits = plain(x)
    probs = (logits.double() + (deviations * points[:, None]) @ axes.T).softmax(-1)
    aleatoric, total = (torch.special.entr(q).sum(-1) for q in (probs, probs.mean(0)))
    assert {risk[name].dtype for name in risk} == {torch.float32}
    torch.testing.assert_close(risk.total.double(), total, rtol=1e-4, atol=0)
    torch.testing.assert_close(risk.epistemic.double(), total - aleatoric.mean(0), rtol=5e-3, atol=1e-6)
    assert y.dtype is logits.dtype
    torch.testing.assert_close(y.double(), probs.mean(0).log(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("cast", lambda y: y.float()),
        ("scaled", lambda y: y * torch.full((3,), 2.0)),
        ("scaled by a number", lambda y: 2 * y + 1),
        ("a cast before the scale", lambda y: 2 * y.float()),
        ("reshaped", lambda y: y.reshape(-1, 3, 1).squeeze(-1)),
    ],
)
@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_predictions_have_the_dtype_of_the_models_own(name: str, tail: Any, strategy: str) -> None:
    wrapped, plain, _ = fitted(None, "autocast", tail)
    wrapped = laplace.Wrapper(None, PRIOR, NOISE, strategy=strategy)(plain).eval().fit([(rows(100, 0), None)])
    with torch.autocast("cpu", torch.bfloat16):
        prediction = plain(rows(5, 1))
        y, risk = wrapped(rows(5, 1), return_risk=True)
        assert y.dtype is prediction.dtype is wrapped(rows(5, 1)).dtype
    assert risk.dtype is torch.float32
    torch.testing.assert_close(y, prediction, rtol=0.01, atol=0.01)


def test_statistics_stay_in_float32_whatever_the_model_is_cast_to() -> None:
    wrapped, _, _ = fitted(None, "float16")
    kept = {name: buffer.dtype for name, buffer in wrapped.named_buffers()}
    assert kept
    assert set(kept.values()) == {torch.float32}
    assert {p.dtype for p in wrapped.parameters()} == {torch.float16}
    assert {b.dtype for b in wrapped.double().buffers()} == {torch.float64}


class Tempered(nn.Module):
    """Multiplies the scores of its last layer, which are small at first."""

    def __init__(self, scale: float, size: float) -> None:
        super().__init__()
        self.last, self.scale = nn.Linear(4, 3), scale
        with torch.no_grad():
            self.last.weight.copy_(size * torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
            self.last.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.last(x)


@pytest.mark.parametrize("size", [0.0, 1e-4, 0.3])
@pytest.mark.parametrize("scale", [1.0, 1.3, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"], ids=str)
def test_a_temperature_counts_in_every_precision(dtype: Any, scale: float, size: float) -> None:
    """Scores of the last layer, and of the model, may give nearly the same probabilities and still differ by a factor."""
    model = Tempered(scale, size).to(torch.float32 if dtype == "autocast" else dtype)
    x = rows(200, 0).to(model.last.weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        wrapped = laplace.Wrapper(prior_precision=PRIOR, output="logits")(model).eval().fit([(x, None)])
        p = model(x).detach().double().softmax(-1)
    phi = torch.cat([x.double(), torch.ones(200, 1)], 1)
    fisher = scale**2 * (torch.diag(p.mean(0)) - p.T @ p / 200)
    eigenvalues = torch.linalg.eigvalsh(phi.T @ phi)[:, None] * torch.linalg.eigvalsh(fisher).clamp_min(0)
    variance = wrapped.state_dict()["last.weight@laplace_variance"].double()
    torch.testing.assert_close(variance, 1 / (eigenvalues + PRIOR), rtol=0.03, atol=1e-4)


def test_a_temperature_in_probabilities_of_half_precision_is_refused() -> None:
    model = nn.Sequential(Tempered(1.5, 0.3), nn.Softmax(-1)).bfloat16()
    wrapped = laplace.Wrapper(layer="0.last", prior_precision=PRIOR, output="probs")(model).eval()
    with pytest.raises(ValueError, match="depends on it in another way"):
        wrapped.fit([(rows(50, 0).bfloat16(), None)])


def test_scaled_scores_of_a_map_have_their_slope() -> None:
    class Map(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.last(x).movedim(-1, 1)

    model, x = Map(), torch.randn(3, 5, 6, 4, generator=torch.Generator().manual_seed(0))
    flat = laplace.Wrapper(prior_precision=PRIOR, output="logits")(nn.Sequential(model.last, Twice())).eval()
    wrapped = laplace.Wrapper(prior_precision=PRIOR, output=Logits(dim=1))(model).eval().fit([(x, None)])
    flat.fit([(x.reshape(-1, 4), None)])
    for part in ("variance", "mixing"):
        state, expected = wrapped.state_dict(), flat.state_dict()
        torch.testing.assert_close(state[f"last.weight@laplace_{part}"], expected[f"0.weight@laplace_{part}"])


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x
