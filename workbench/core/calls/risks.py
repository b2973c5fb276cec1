"""Reduction of the outputs of all branches to a prediction and its risks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...engine.effects.random import values_unavailable
from ...engine.results import Running
from ...engine.run import Branched
from ...engine.tree import names, paths
from ..crossfit import Committee, committee_of
from ..method import Call, split_heads, sqrt
from ..outputs import detections
from ..outputs.class_scores import Classes, at_least_float32
from ..outputs.meanings import Detections, Meaning, Values
from ..outputs.options import MEAN, form_of, has_detections
from ..outputs.resolution import check_numbers, resolve
from ..outputs.returned_distributions import distributions_in, with_moments
from ..outputs.slips import warn_of_doubts, warn_of_range, warn_of_whole_numbers
from ..standardize import Scaling
from . import running_moments
from .running_moments import RunningClasses, RunningValues, entropy


def reduced(
    wrapped: Any, branched: Branched, return_risk: bool, scaling: Scaling | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the prediction and the risks by name, each output reduced over the branches according to its meaning.

    Args:
        wrapped: the wrapped object.
        branched: the outputs of all branches.
        return_risk: whether risks are computed.
        scaling: standardization, by which values and their standard deviations are converted to original units.

    Raises:
        TypeError: if the output holds no floating-point tensor.
        ValueError: if a cross-fitted model returns distributions.
    """
    record, committee = wrapped._workbench, committee_of(wrapped)
    if wrapped.training and not return_risk and not branched.axes and not has_detections(record.output):
        output = branched.rebuild(branched.leaves)
        if distributions_in(output):  # a training loop needs their log_prob
            return output, {}
    branched, variances = with_moments(branched, lambda: pair_of(record, branched.axes))
    if variances:
        record.says_distributions = True
        if committee is not None:
            raise ValueError(
                "cross-fitting widens the noise of risk heads, and this model returns distributions: train without folds"
            )
    meanings = meanings_of(record, branched)
    has_one_target = sum(isinstance(meaning, Values) for meaning in meanings) == 1
    leaves: list[Any] = []
    risks: dict[str, list[Any]] = {}
    for i, (leaf, meaning) in enumerate(zip(branched.leaves, meanings, strict=True)):
        measured: dict[str, Any] = {}
        if isinstance(leaf, RunningClasses):
            y, measured = leaf.result()
            leaves.append(y.to(branched.plain_dtype(i)))
        elif not isinstance(leaf, Tensor | RunningValues) or isinstance(meaning, Detections):
            leaves.append(leaf)
        elif isinstance(leaf, Tensor) and meaning is None:
            leaves.append(_majority(record, branched.axes, leaf))
        elif isinstance(leaf, Tensor) and isinstance(meaning, Classes):
            check_numbers(meaning, leaf, record.warned)
            warn_of_doubts(wrapped, meaning, leaf, len(branched.axes))
            y, measured = _class_risks(record, committee, branched.axes, leaf, meaning, return_risk)
            leaves.append(y.to(branched.plain_dtype(i)))
        else:
            if isinstance(leaf, RunningValues):
                y, measured = leaf.result(return_risk)
            elif meaning is MEAN:
                y = _mean(record, committee, branched.axes, leaf)
            else:
                warn_of_whole_numbers(wrapped, leaf, len(branched.axes))
                if return_risk:
                    warn_of_range(wrapped, leaf, len(branched.axes))
                y, measured = _values(record, committee, branched.axes, leaf, return_risk, variances.get(i))
            y = y.to(branched.plain_dtype(i))
            if scaling is not None and meaning is not MEAN and (has_one_target or scaling.are_targets(y)):
                y, measured = scaling.prediction(y), {name: scaling.risk(value) for name, value in measured.items()}
            leaves.append(y)
        for name, value in measured.items():
            risks.setdefault(name, [None] * len(branched.leaves))[i] = value
    if has_detections(record.output):
        return _with_detections(record.output, branched, leaves, risks)
    output = branched.rebuild(leaves)
    if all(meaning is None for meaning in meanings):
        refuse_without_numbers(output, leaves)
    return output, {name: branched.rebuild(values) for name, values in risks.items()}


def refuse_without_numbers(output: Any, leaves: Sequence[Any]) -> NoReturn:
    """Refuse an output that has nothing to average.

    Args:
        output: of the model, or of its branches.
        leaves: its leaves.

    Raises:
        TypeError: always.
    """
    kinds = ", ".join(
        f"{path}: {str(leaf.dtype).removeprefix('torch.') if isinstance(leaf, Tensor) else type(leaf).__name__}"
        for path, leaf in zip(paths(output), leaves, strict=True)
    )
    raise TypeError(
        f"the output holds no floating-point tensor ({kinds}), so it has no risk; return the scores or values, and do argmax, rounding "
        "or decoding outside the wrapped model"
    )


def _with_detections(
    option: Any, branched: Branched, leaves: list[Any], risks: dict[str, list[Any]]
) -> tuple[Any, dict[str, Any]]:
    """Return the prediction and the risks of an output with boxes, whose leaves still hold the boxes of each branch."""
    tree_names, depth = names(branched.rebuild(leaves)), len(branched.axes)
    shares = []
    for image in detections.images_of(option, tree_names, branched.leaves, depth):
        y, measured = detections.combine(image, branched.leaves, tree_names, depth)
        for i, leaf in y.items():
            leaves[i] = leaf
        if (seen := measured.pop("seen", None)) is not None:
            shares.append((image, seen))
        for name, by_place in measured.items():
            for i, value in by_place.items():
                risks.setdefault(name, [None] * len(leaves))[i] = value
    trees = {name: branched.rebuild(values) for name, values in risks.items()}
    for image, seen in shares:
        trees["epistemic"] = detections.with_seen(trees["epistemic"], image, seen)
    return branched.rebuild(leaves), trees


def meanings_of(record: Any, branched: Branched) -> list[Meaning | None]:
    """Return the meaning of each part of an output; see `resolution.resolve`."""
    depth = len(branched.axes)
    leaves = [leaf.stand_in[(None,) * depth] if isinstance(leaf, Running) else leaf for leaf in branched.leaves]
    return resolve(record.output, lambda: names(branched.rebuild(branched.leaves)), leaves, depth)


def _mean(record: Any, committee: Committee | None, axes: tuple[str, ...], leaf: Tensor) -> Tensor:
    """Return the mean over the models of a part without risk, such as a loss; auxiliary heads are left out."""
    if (pair := pair_of(record, axes)) is not None:
        leaf, axes = leaf.select(axes.index(pair.name), 0), tuple(axis for axis in axes if axis != pair.name)
    return _values(record, committee, axes, leaf, return_risk=False)[0]


def _values(
    record: Any,
    committee: Committee | None,
    axes: tuple[str, ...],
    leaf: Tensor,
    return_risk: bool,
    variance: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the prediction and standard deviations of values; `variance` is the aleatoric variance that the model itself returns."""
    by_name = {method.name: method for method in record.methods}
    dtype, leaf = leaf.dtype, at_least_float32(leaf) if axes else leaf
    if not return_risk:
        for dim in reversed(range(len(axes))):
            if committee is not None and axes[dim] == committee.axis:
                leaf = committee.weighed(leaf, dim).mean(dim)
            else:
                leaf = by_name[axes[dim]].average(leaf, dim)
        return leaf.to(dtype), {}
    parts = {"y": leaf} if variance is None else {"y": leaf, "aleatoric": variance}
    for dim in reversed(range(len(axes))):
        if committee is not None and axes[dim] == committee.axis:
            if "aleatoric" in parts:
                parts["aleatoric"] = committee.widened(parts["aleatoric"].sqrt(), dim).square()
            parts = committee.spread(parts, dim)
        else:
            parts = by_name[axes[dim]].reduce(parts, dim)
    y = parts.pop("y").to(dtype)
    out = {name: sqrt(variance) for name, variance in parts.items()}
    if parts:
        out["total"] = sqrt(sum(parts.values())) if len(parts) > 1 else next(iter(out.values()))  # type: ignore[arg-type]
    return y, out


def _class_risks(
    record: Any,
    committee: Committee | None,
    axes: tuple[str, ...],
    leaf: Tensor,
    meaning: Classes,
    return_risk: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `_classes`; large maps are processed some positions at a time, since intermediates would take several times their memory."""
    if (
        values_unavailable()
        or torch.is_grad_enabled()  # autograd keeps all intermediates anyway
        or leaf.numel() <= running_moments.PIECE_SIZE
        or not axes
        or pair_of(record, axes) is not None  # heads may draw random numbers
        or not running_moments.piece_of(meaning, leaf.flatten(0, len(axes) - 1))[1]
    ):
        return _classes(record, committee, axes, leaf, meaning, return_risk)
    weights = None
    if committee is not None and committee.axis in axes:
        ones = torch.ones(leaf.shape[: len(axes)], device=leaf.device)
        weights = committee.weighed(ones, axes.index(committee.axis)).flatten().tolist()
    branches = leaf.flatten(0, len(axes) - 1)
    means = RunningClasses(meaning, branches, return_risk)
    means.add(branches, weights)
    return means.result()


def _classes(
    record: Any,
    committee: Committee | None,
    axes: tuple[str, ...],
    leaf: Tensor,
    meaning: Classes,
    return_risk: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the class prediction and its entropies in nats (Depeweg et al. 2018).

    Total H(E p), aleatoric E H(p), and epistemic, their difference: the mutual information between class and model.
    """
    if (pair := pair_of(record, axes)) is not None:
        leaf, heads = split_heads(leaf, axes.index(pair.name))
        axes = tuple(axis for axis in axes if axis != pair.name)
        probs = pair.probs(leaf, heads, meaning)
    else:
        probs = meaning.probabilities(leaf)

    def average(values: Tensor) -> Tensor:
        if committee is not None and committee.axis in axes:
            values = committee.weighed(values, axes.index(committee.axis))
        return values.flatten(0, len(axes) - 1).mean(0)

    mean = average(probs) if axes else probs
    y = meaning.form(mean, leaf) if axes else leaf
    if not return_risk:
        return y, {}
    total, entropies = entropy(mean), entropy(probs)
    aleatoric = average(entropies) if axes else entropies
    out = {"aleatoric": aleatoric, "total": total}
    if axes:
        out["epistemic"] = (total - aleatoric).clamp_min(0)
    return y, out


def pair_of(record: Any, axes: tuple[str, ...]) -> Any:
    """Return the method whose axis pairs the model's own head with auxiliary heads, None if no such axis is among these."""
    methods = record.methods if axes else ()
    for method in methods:  # a plain loop: torch.compile cannot trace a comprehension that assigns
        axis = method.axis(Call(False, True))
        if axis is not None and axis.own_first and axis.name in axes:
            return method
    return None


def noise_moves_classes(record: Any) -> bool:
    """Return whether predicted class probabilities depend on risk being asked: several models average them under the noise of risk heads."""
    axes = [axis for method in record.methods if (axis := method.axis(Call(False, True))) is not None]
    return len(axes) > 1 and any(axis.own_first for axis in axes) and form_of(record.output) != "values"


def _majority(record: Any, axes: tuple[str, ...], leaf: Tensor) -> Tensor:
    """Return the most frequent value over the models, for integers and booleans; auxiliary heads are left out."""
    if (pair := pair_of(record, axes)) is not None:
        leaf = leaf.select(axes.index(pair.name), 0)
        axes = tuple(axis for axis in axes if axis != pair.name)
    if not axes:
        return leaf
    flat = leaf.flatten(0, len(axes) - 1)
    return flat[0] if flat.shape[0] == 1 else flat.to(torch.int64).mode(0).values.to(leaf.dtype)
