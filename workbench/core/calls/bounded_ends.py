"""Models that end in a function of limited range, such as softplus, which the risk heads of `sculpt` repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...engine.tree import is_float, names
from ..outputs.class_scores import at_least_float32
from ..outputs.meanings import Values
from ..outputs.resolution import resolve
from ..single_warnings import warn_once
from .risks import meanings_of, pair_of

T = TypeVar("T")

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

# how far the result of a last layer before a relu is raised in the risk heads, so that the relu, which has no inverse, changes nothing
RAISED = 16.0


def _of_positive(r: Tensor, step: float) -> Tensor:
    """Return the inverse of softplus, so that the risk is r: that of softplus is the last layer's result z, that of exp is exp(z)."""
    r = r.where(r != 0, torch.finfo(r.dtype).tiny)
    return r + (-torch.expm1(-r)).log()  # NaN below 0


def _of_relu(r: Tensor, step: float) -> Tensor:
    return (r - RAISED).where(r >= 0, torch.nan)


def _of_sigmoid(r: Tensor, step: float) -> Tensor:
    """Return z for r = sigmoid(z) where z is negative, and otherwise sinh(z), which is of any size before the sigmoid saturates."""
    inside = r.clamp(torch.finfo(r.dtype).tiny, 1 - step)
    raw = inside.logit().where(inside < 0.5, (inside - 0.5) / (inside * (1 - inside)))
    return raw.where((r >= 0) & (r <= 1), torch.nan)


def _of_tanh(r: Tensor, step: float) -> Tensor:
    return _of_sigmoid((1 + r.clamp_min(step - 1)).where(r >= -1, -1) / 2, step)  # tanh(z) = 2 sigmoid(2 z) - 1


def _of_elu(r: Tensor, step: float) -> Tensor:
    below = r.clamp(step - 1, 0)
    return r.where(r > 0, below.log1p()).where(r >= -1, torch.nan)


# by the name of an end, how the raw output of a risk head follows from what it ends in, and the distance of numbers below 1 in its dtype: any
# real number. A value that the end cannot have, because the model was changed, becomes NaN, which the loss shows
RAW: dict[str, Callable[[Tensor, float], Tensor]] = {
    "softplus": _of_positive,
    "exp": _of_positive,
    "relu": _of_relu,
    "sigmoid": _of_sigmoid,
    "tanh": _of_tanh,
    "elu": _of_elu,
}


def undo_ends(wrapped: Any, branched: Any) -> None:
    """Let the risk heads end as if the model ended in its last layer; its own output stays as it is.

    Args:
        wrapped: the wrapped object.
        branched: the outputs of all branches, which are replaced.
    """
    pair = pair_of(wrapped._workbench, branched.axes)
    ends = getattr(pair, "ends", None)
    if not ends:
        return
    dim = branched.axes.index(pair.name)
    tree_names, meanings = names(branched.rebuild(branched.leaves)), meanings_of(wrapped._workbench, branched)
    for i, (name, meaning) in enumerate(zip(tree_names, meanings, strict=True)):
        leaf = branched.leaves[i]
        if name in ends and isinstance(meaning, Values) and isinstance(leaf, Tensor) and leaf.is_floating_point():
            prediction, heads = leaf.narrow(dim, 0, 1), leaf.narrow(dim, 1, leaf.shape[dim] - 1)
            raw = RAW[ends[name]](at_least_float32(heads), torch.finfo(leaf.dtype).eps / 2)
            branched.leaves[i] = torch.cat([prediction, raw.to(leaf.dtype)], dim)


_KEY = "bounded end"


def warn_of_bounded_end(
    wrapped: Any, leaves: Sequence[Any], tree_names: Callable[[], list[str]], depth: int, axes: tuple[str, ...]
) -> None:
    """Warn, once per wrapped object, if risk heads of values end in a function of limited range that is not undone.

    Of several outputs, only those are looked at that `output=` names.

    Args:
        wrapped: the wrapped object.
        leaves: leaves of an output in training mode, with their graph.
        tree_names: function that returns their dotted names.
        depth: number of leading dimensions of branches.
        axes: names of the axes among which that of the risk heads may be.
    """
    record = wrapped._workbench
    if _KEY in record.warned:
        return
    pair = pair_of(record, axes)
    # other families apply exp or sigmoid themselves, behind which the model's own end is out of sight
    if pair is None or not getattr(pair.distribution, "own_prediction", False):
        return
    floats = [leaf for leaf in leaves if is_float(leaf)]
    if not floats or all(leaf.grad_fn is None for leaf in floats):
        return
    output_names, meanings = tree_names(), resolve(record.output, tree_names, leaves, depth)
    # of several outputs some may not be trained, such as attention weights, unless they are named
    named = frozenset(map(str, record.output)) if isinstance(record.output, Mapping) else frozenset()
    ends = {
        name: bounded_end(leaf.grad_fn)
        for name, leaf, meaning in zip(output_names, leaves, meanings, strict=True)
        if isinstance(meaning, Values) and isinstance(leaf, Tensor) and name not in pair.ends
        if len(leaves) == 1 or name in named
    }
    name, end = next(((name, end) for name, end in ends.items() if end), ("", None))
    if end is None:
        record.warned.add(_KEY)  # looked at once
        return
    family = pair.distribution
    harm = f"{family} gets no raw numbers but those"
    if family.by_risk:
        harm = "where that is 0 or above, their softplus, the risk, is at least 0.69, in the units that the model is trained in"
    warn_once(
        wrapped,
        _KEY,
        f"{pair.name}: {f'output {name!r} of the model' if name else 'the model'} ends in {end}, and so do the risk heads, which are copies of "
        f"its last layers: {harm}. Let the model end in its last linear layer, or in softplus, relu, exp, sigmoid or tanh as the last thing "
        f"that forward does, which the heads undo (relu only after a layer with a bias); for targets above 0, "
        f"{pair.name}.Wrapper(torch.distributions.LogNormal) or Gamma makes the prediction positive, and Beta one between 0 and 1",
    )


def bounded_end(node: Any, keeping: Set[str] = KEEPING) -> str | None:
    """Return the name of the function of limited range that a node of autograd ends in; None if there is none.

    Args:
        node: the node.
        keeping: names of the nodes that may follow the function.
    """

    def end(name: str, node: Any, before: list[str | None]) -> str | None:
        return BOUNDED.get(name) or (before[0] if before and all(before) else None)

    return along_graph(node, keeping - BOUNDED.keys(), end)


def along_graph(root: Any, followed: Set[str], value: Callable[[str, Any, list[T]], T]) -> T:
    """Return the value of a node of autograd, which follows from those of the nodes before it.

    Every node is looked at once and none by recursion: in a solver of many steps, each step takes results of the one before several times.

    Args:
        root: the node, None for a constant.
        followed: names, up to "Backward", of the nodes whose value depends on the nodes before them.
        value: function of the name of a node, the node, and the values before it (none if it is not followed) that returns its value.
    """
    values: dict[Any, T] = {}
    pending = [root]
    while pending:
        node = pending[-1]
        name = "" if node is None else node.name().split("Backward")[0]
        before = [one for one, _ in node.next_functions if one is not None] if name in followed else []
        unknown = [one for one in before if one not in values]
        if unknown:
            pending += unknown
            continue
        values[pending.pop()] = value(name, node, [values[one] for one in before])
    return values[root]


__all__ = ["RAISED", "RAW", "along_graph", "bounded_end", "undo_ends", "warn_of_bounded_end"]
