"""Class probabilities of a Laplace posterior in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.additions import extra
from ..core.method import evaluating
from ..core.outputs.class_scores import Binary, Probs, at_least_float32
from ..core.outputs.options import form_of
from ..core.ownership import table_of
from ..engine.plan import Bank
from ..engine.tree import flatten
from .densities.moments import full_precision
from .last_layer import CurvatureFit
from .posterior_points import PARTS, variances
from .weight_sets import method_of


def classifier_method(wrapped: Any, function: str) -> Any:
    """Return the laplace method of a fitted classifier, or raise an error that names the function."""
    method = method_of(wrapped, "laplace")
    if _class_form(wrapped) is None:
        raise ValueError(f'{function} is for class outputs: wrap the model with output="logits", "probs" or "binary"')
    method.check_ready(wrapped)
    return method


def _class_form(wrapped: Any) -> str | None:
    """Return the form of the class scores, "logits", "probs" or "binary"; None if there are none, or some of several forms."""
    output = wrapped._workbench.output
    forms = {form_of(entry) for entry in (output.values() if isinstance(output, Mapping) else [output])}
    forms &= {"logits", "probs", "binary"}
    return forms.pop() if len(forms) == 1 else None


@torch.no_grad()
def mean_field(wrapped: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute class probabilities in closed form, instead of averaging draws (MacKay 1992; Gibbs 1997 for several classes).

    softmax(z / sqrt(1 + pi v / 8)) of the logits z and their variances v, averaged over voters. It takes one pass; three if the model scales or
    shifts the outputs of the layer with the posterior.

    Args:
        wrapped: model wrapped by `laplace.Wrapper` with output="logits" or "probs", and fitted.
        args, kwargs: inputs of the model.

    Returns:
        Probabilities [rows, classes].

    Raises:
        TypeError: if the model is not wrapped by laplace.
        ValueError: if its output is not class scores.
        NotFittedError: if it was not fitted.

    Example:
        >>> import torch
        >>> from workbench import laplace
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> model = laplace.Wrapper(output="logits")(torch.nn.Linear(1, 2)).eval().fit(x)
        >>> mean_field(model, x).shape
        torch.Size([50, 2])
    """
    method, table, scaling = classifier_method(wrapped, "mean_field"), table_of(wrapped), extra(wrapped, "scaling")
    if scaling is not None:
        args, kwargs = scaling.inputs(args, kwargs)
    probs = []
    for place in method.places(table):
        with evaluating(wrapped):
            scores, slope, features = _scores(method.curvature_fit(wrapped, place), args, kwargs)
        bank = Bank(table.get)
        basis, variance, mixing = (table.record.rules[method.part(part)].pick(bank, place) for part in PARTS)
        with full_precision(basis):
            v = variances(features.to(basis.dtype), basis, variance) @ mixing.square().mT
        scores = scores / (1 + math.pi * slope.square().to(v) * v / 8).sqrt()
        probs.append(scores.sigmoid() if _class_form(wrapped) == "binary" else scores.softmax(-1))
    return torch.stack(probs).mean(0)


def _scores(layer: CurvatureFit, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits [..., classes] of a pass, their slopes in the outputs of the layer [classes], and the layer's inputs."""
    output, taps = layer.probe_layer(args, kwargs)
    leaves, z = flatten(output)[0], at_least_float32(taps["outputs"])
    if any(isinstance(leaf, Tensor) and torch.equal(leaf, taps["outputs"]) for leaf in leaves):
        return z, z.new_ones(z.shape[-1]), taps["features"]
    layer.identify_output(args, kwargs, output, taps)
    meaning: Any = layer.meaning
    logits = meaning.log_scores(leaves[layer.at])
    if isinstance(meaning, Binary):
        logits = logits[..., 1].reshape(z.shape)
    elif isinstance(meaning, Probs) or torch.allclose(logits.softmax(-1), z.softmax(-1), rtol=0, atol=1e-4):
        logits = z  # the same up to a constant for each row
    return logits, layer.slope, taps["features"]


__all__ = ["classifier_method", "mean_field"]
