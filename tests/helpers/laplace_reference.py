"""Expected answers of a model wrapped by laplace: a plain model whose last-layer outputs are shifted by draws from the dense posterior."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from helpers.conformance_table import DATA_NOISE, PRIOR_PRECISION
from helpers.meaning_models import Meant
from workbench.testing.models import build, inputs, seeded
from workbench.testing.reference import Branch

SEEN = {"rows": 40, "seed": 3}  # the rows to which the models of the table are fitted


def laplace_answers(model: Meant, state: dict[str, Tensor], dtype: torch.dtype) -> list[Branch]:
    """Return a branch per posterior draw.

    Draws and their axes are taken from the wrapper; that the curvature is diagonal along these axes is checked.

    Args:
        model: model of the table, fitted in the precision of its parameters, without autocast.
        state: state of the wrapped model.
        dtype: dtype of parameters and inputs in the call.
    """
    name = next(key for key in state if key.endswith(".weight@laplace_points")).partition(".weight@")[0]
    points, mixing = (state[f"{name}.weight@laplace_{part}"].double() for part in ("points", "mixing"))
    exact = torch.float32 if dtype.itemsize < 4 else dtype
    with torch.autocast("cpu", enabled=False):
        train_features, outputs = _layer(model, state, name, dtype, exact, SEEN)
    kind = next(kind for kind in model.leaves.values() if kind != "mean")
    size, eye = outputs.shape[-1], torch.eye(train_features.shape[-1], dtype=torch.float64)
    if kind == "values":
        mixing, covariance = (
            eye[:size, :size],
            torch.linalg.inv(train_features.T @ train_features / DATA_NOISE**2 + PRIOR_PRECISION * eye),
        )
        points = points.expand(len(points), size)
        covariance = torch.kron(torch.eye(size).double(), covariance.contiguous())
    else:
        if isinstance(kind, str):
            p = outputs.sigmoid()
            fisher = (p * (1 - p)).mean(0).diag()
        else:
            p = outputs.softmax(-1)
            fisher = torch.stack([torch.diag(row) - row[:, None] * row for row in p]).mean(0)
        turned = mixing.T @ fisher @ mixing
        tolerance = 1e-4 if dtype.itemsize < 4 else 1e-6  # probabilities that the model returns have its own precision
        torch.testing.assert_close(turned, turned.diagonal().diag(), rtol=0, atol=tolerance)
        covariance = torch.linalg.inv(
            torch.kron(fisher, train_features.T @ train_features)
            + PRIOR_PRECISION * torch.eye(size * len(eye)).double()
        )
    features, _ = _layer(model, state, name, dtype, exact, {})
    blocks = covariance.reshape(size, len(eye), size, len(eye))
    variances = torch.einsum("nd,adbe,ne->nab", features, blocks, features)
    deviations = (mixing.T @ variances @ mixing).diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    branches = []
    for point in points:
        plain, (args, kwargs) = _plain(model, state, dtype, exact), inputs(model.case, dtype)
        shift = (deviations * point) @ mixing.T
        plain.get_submodule(name).register_forward_hook(
            lambda layer, layer_inputs, out, shift=shift: out.to(exact) + shift.reshape(out.shape).to(exact)
        )
        with torch.no_grad(), seeded():
            branches.append(Branch({"sculpt": 0}, plain, (args, kwargs), {}, plain(*args, **kwargs)))
    return branches


def _plain(model: Meant, state: dict[str, Tensor], dtype: torch.dtype, exact: torch.dtype) -> nn.Module:
    plain = build(model.case, exact).to(dtype)
    plain.load_state_dict({name: tensor for name, tensor in state.items() if "@" not in name})
    return plain


def _layer(
    model: Meant, state: dict[str, Tensor], name: str, dtype: torch.dtype, exact: torch.dtype, which: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """Return features [rows, inputs + 1] and outputs [rows, outputs] of the last layer, in float64."""
    recorded: list[Any] = []
    plain, (args, kwargs) = _plain(model, state, dtype, exact), inputs(model.case, dtype, **which)
    plain.get_submodule(name).register_forward_hook(
        lambda layer, layer_inputs, out: recorded.extend([layer_inputs[0], out])
    )
    with torch.no_grad():
        plain(*args, **kwargs)
    features, outputs = (t.detach().double().reshape(-1, t.shape[-1]) for t in recorded)
    return torch.cat([features, torch.ones(len(features), 1).double()], 1), outputs


__all__ = ["laplace_answers"]
