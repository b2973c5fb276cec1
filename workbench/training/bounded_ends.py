"""Models that end in a function of limited range, such as softplus, which the risk heads of `sculpt` repeat."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from workbench.core.outputs.meanings import Values
from workbench.core.wrapped import Wrapped
from workbench.errors import WorkbenchWarning
from workbench.introspect.source_lines import user_stacklevel

# nodes of autograd up to "Backward": functions of limited range, and those that keep a range limited
BOUNDED = {
    "Softplus": "softplus",
    "Relu": "relu",
    "Exp": "exp",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Elu": "elu",
    "Abs": "abs",
    "Hardtanh": "hardtanh",
    "Hardsigmoid": "hardsigmoid",
    "Clamp": "clamp",
    "ClampMin": "clamp",
    "Softmax": "softmax",
}
KEEPING = frozenset([
    "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute", "Expand", "Alias", "Clone", "ToCopy",
    "Select", "Slice", "Index", "IndexSelect", "Cat", "Stack", "Unbind", "Split", "Mean", "Sum",
    "Mul", "Div", "Add", "Sub", "Neg", "Rsub", "Reciprocal", "UpsampleBilinear2D", "UpsampleNearest2D",
])  # fmt: skip


def warn_about_bounded_end(wrapped: Wrapped, prediction: Any) -> None:
    """Warn if the values that `sculpt` gives a noise end in a function of limited range.

    Args:
        wrapped: the model.
        prediction: its prediction of a batch, with its graph.
    """
    method: Any = next((m for m in wrapped._workbench.methods if m.name == "sculpt"), None)
    output = wrapped._workbench.output
    is_values = output is None or output == "values" or isinstance(output, Values)
    # other families apply exp or sigmoid themselves, behind which the model's own end is out of sight
    if method is None or not method.distribution.own_prediction or not is_values or not isinstance(prediction, Tensor):
        return
    end = bounded_end(prediction.grad_fn)
    if end is None:
        return
    family = method.distribution
    harm = f"{family} gets no raw numbers but those"
    if family.by_risk:
        harm = "where that is 0 or above, their softplus, the risk, is at least 0.69, in the units that the model is trained in"
    warnings.warn(
        f"sculpt: the model ends in {end}, and so do the risk heads, which are copies of its last layers: {harm}. Let the model end in its "
        "last linear layer; for targets above 0, sculpt.Wrapper(torch.distributions.LogNormal) or Gamma makes the prediction positive, and "
        "Beta one between 0 and 1",
        WorkbenchWarning,
        stacklevel=user_stacklevel(),
    )


def bounded_end(node: Any) -> str | None:
    """Return the name of the function of limited range that a node of autograd ends in; None if there is none."""
    name = "" if node is None else node.name().split("Backward")[0]
    if name in BOUNDED:
        return BOUNDED[name]
    if name not in KEEPING:
        return None
    ends = [bounded_end(before) for before, _ in node.next_functions if before is not None]
    return ends[0] if ends and all(ends) else None


__all__ = ["bounded_end", "warn_about_bounded_end"]
