"""Models that end in a function of limited range, such as softplus, which the risk heads of `sculpt` repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..batches.dealing import tell
from ..outputs.meanings import Values
from .risks import pair_of

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


_KEY = "bounded end"


def tell_bounded_end(wrapped: Any, leaves: Sequence[Any], axes: tuple[str, ...]) -> None:
    """Warn, once per wrapped object, if the values that risk heads give a noise end in a function of limited range.

    Args:
        wrapped: the wrapped object.
        leaves: leaves of an output in training mode, with their graph.
        axes: names of the axes among which that of the risk heads may be.
    """
    record = wrapped._workbench
    if _KEY in record.told or len(leaves) != 1 or not isinstance(leaves[0], Tensor) or leaves[0].grad_fn is None:
        return
    pair = pair_of(record, axes)
    is_values = record.output is None or record.output == "values" or isinstance(record.output, Values)
    # other families apply exp or sigmoid themselves, behind which the model's own end is out of sight
    if pair is None or not getattr(pair.distribution, "own_prediction", False) or not is_values:
        return
    end = bounded_end(leaves[0].grad_fn)
    if end is None:
        record.told.add(_KEY)  # looked at once
        return
    family = pair.distribution
    harm = f"{family} gets no raw numbers but those"
    if family.by_risk:
        harm = "where that is 0 or above, their softplus, the risk, is at least 0.69, in the units that the model is trained in"
    tell(
        wrapped,
        _KEY,
        f"{pair.name}: the model ends in {end}, and so do the risk heads, which are copies of its last layers: {harm}. Let the model end in its "
        f"last linear layer; for targets above 0, {pair.name}.Wrapper(torch.distributions.LogNormal) or Gamma makes the prediction positive, "
        "and Beta one between 0 and 1",
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


__all__ = ["bounded_end", "tell_bounded_end"]
