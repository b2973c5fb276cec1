"""Calls of a wrapped object: the plan of a run, and the prediction and risks of its branches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.effects.random import values_unavailable
from ..engine.plan import Bank, Plan
from ..engine.run import Branched, NotDealableError
from ..engine.tree import is_float, paths, tensors, tree_map
from ..risk import Risk
from .crossfit import Committee, committee_of
from .dealing import WHOLE, deal, tell
from .method import Call, apart, sqrt
from .ownership import engine_of, extra, table_of


# ---- the plan of a call
def plan_of(wrapped: Any, call: Call, rows: Sequence[Tensor] | Tensor | None = None) -> Plan:
    """What the branches of a call are."""
    record, table = wrapped._workbench, table_of(wrapped)
    axes = tuple(axis for axis in [method.axis(call) for method in record.methods] if axis is not None)
    interventions = tuple(i for i in [method.intervention(table, call) for method in record.methods] if i is not None)
    apart = any(axis.apart for axis in axes)
    looped = 'purity="allow" lets each pass see what the one before it changed' if record.purity == "allow" else ""
    return Plan(
        axes,
        record.rules,
        Bank(table.get),
        interventions,
        shares_trunk=not apart and not call.dealt and table.has_trunk(tuple(axis.name for axis in axes)),
        loop_only=next((i.loop_only for i in interventions if i.loop_only), looped),
        dealt=next(method.name for method in record.methods if method.deals(True, True)) if call.dealt else "",
        rows=() if rows is None else rows,
        chunk=record.chunk,
        purity=record.purity,
    )


def run(wrapped: Any, plan: Plan, args: tuple, kwargs: dict[str, Any]) -> tuple[Branched, Sequence[Any]]:
    return engine_of(wrapped).run(plan, args, kwargs, wrapped._workbench.strategy)


# ---- prediction
def predict(wrapped: Any, args: tuple, kwargs: dict[str, Any], return_risk: bool, tile_and_reduce: bool | None) -> Any:
    """See `Wrapped.forward`."""
    record, scaling = wrapped._workbench, extra(wrapped, "scaling")
    raw_args = args
    if scaling is not None:
        args = scaling.inputs(args)
    measuring = [method for method in record.methods if method.own_pass] if return_risk else []
    for method in record.methods if return_risk else ():
        method.check_ready(wrapped)
    if measuring and len(record.methods) == 1:
        y, risk = measuring[0].measure(wrapped, args, kwargs)
        _warn_nan(wrapped, raw_args, risk)
        return (scaling.prediction(y) if scaling is not None else y), risk
    rows = None
    n = max([method.deals(wrapped.training, tile_and_reduce is False) for method in record.methods], default=0)
    if n and not tile_and_reduce and (tile_and_reduce is False or not return_risk):
        rows = deal(wrapped, table_of(wrapped), n, args, kwargs)
    call = Call(wrapped.training, return_risk, dealt=rows is not None)
    probe = (args, kwargs)
    if measuring and engine_of(wrapped).effects.writes_tensors is not False:
        probe = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, probe)
    try:
        branched, _ = run(wrapped, plan_of(wrapped, call, rows), args, kwargs)
    except NotDealableError:
        record.dealable = False
        tell(wrapped, "output", f"vote: the output has no row for each row of the input, {WHOLE}")
        branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, return_risk)), args, kwargs)
    y, risks = reduced(wrapped, branched, return_risk)
    if scaling is not None:
        y = scaling.prediction(y)
        if record.output == "values":
            risks = {name: scaling.risk(value) for name, value in risks.items()}
    if not return_risk:
        return y
    for method in measuring:
        risks[method.kind] = method.measure(wrapped, *probe)[1]
    _warn_nan(wrapped, raw_args, risks)
    measured = [name for name in risks if name != "total"]
    if len(record.methods) == 1 and len(measured) == 1 and record.output == "values":
        return y, risks[measured[0]]
    return y, Risk(**risks)


def reduced(wrapped: Any, branched: Branched, return_risk: bool) -> tuple[Any, dict[str, Any]]:
    """The prediction and the standard deviations by name (entropies for class outputs), with the branches' axes removed."""
    record, committee = wrapped._workbench, committee_of(wrapped)
    leaves: list[Any] = []
    risks: dict[str, list[Any]] = {}
    any_float = False
    for i, leaf in enumerate(branched.leaves):
        measured: dict[str, Any] = {}
        if not isinstance(leaf, Tensor):
            leaves.append(leaf)
        elif not is_float(leaf):
            leaves.append(_majority(record, branched.axes, leaf))
        else:
            any_float = True
            reduce = _values if record.output == "values" else _classes
            y, measured = reduce(record, committee, branched.axes, leaf, return_risk)
            leaves.append(y)
        for name, value in measured.items():
            risks.setdefault(name, [None] * len(branched.leaves))[i] = value
    output = branched.rebuild(leaves)
    if not any_float:
        kinds = ", ".join(
            f"{path}: {str(leaf.dtype).removeprefix('torch.') if isinstance(leaf, Tensor) else type(leaf).__name__}"
            for path, leaf in zip(paths(output), leaves, strict=True)
        )
        raise TypeError(
            f"the output holds no floating-point tensor ({kinds}), so it has no risk; return the scores or values, and do argmax, rounding "
            "or decoding outside the wrapped model"
        )
    return output, {name: branched.rebuild(values) for name, values in risks.items()}


def _values(
    record: Any, committee: Committee | None, axes: tuple[str, ...], leaf: Tensor, return_risk: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    by_name = {method.name: method for method in record.methods}
    if not return_risk:
        for dim in reversed(range(len(axes))):
            if committee is not None and axes[dim] == committee.axis:
                leaf = committee.weighed(leaf, dim).mean(dim)
            else:
                leaf = by_name[axes[dim]].average(leaf, dim)
        return leaf, {}
    parts = {"y": leaf}
    for dim in reversed(range(len(axes))):
        if committee is not None and axes[dim] == committee.axis:
            if "aleatoric" in parts:
                parts["aleatoric"] = committee.widened(parts["aleatoric"].sqrt(), dim).square()
            parts = committee.spread(parts, dim)
        else:
            parts = by_name[axes[dim]].reduce(parts, dim)
    y = parts.pop("y")
    out = {name: sqrt(variance) for name, variance in parts.items()}
    if parts:
        out["total"] = sqrt(sum(parts.values())) if len(parts) > 1 else next(iter(out.values()))  # type: ignore[arg-type]
    return y, out


def _classes(
    record: Any, committee: Committee | None, axes: tuple[str, ...], leaf: Tensor, return_risk: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Entropies in nats (Depeweg et al. 2018): total H(E p), aleatoric E H(p), epistemic the mutual information between class and model."""
    logits = record.output == "logits"
    if leaf.dim() - len(axes) < 1:
        raise ValueError(
            f'output="{record.output}" wants class scores [rows, classes], not shape {tuple(leaf.shape[len(axes) :])}'
        )
    if not logits and (leaf.device.type == "cpu" or "probs" not in record.told) and not leaf.is_meta:
        if bool(((leaf < 0) | (leaf > 1)).any()):
            raise ValueError('output="probs", but the model gives numbers outside [0, 1]; use output="logits"')
        if leaf.device.type != "cpu":
            record.told.add("probs")  # once: a look makes the program wait for the device
    if (pair := pair_of(record, axes)) is not None:
        own, beside = apart(leaf, axes.index(pair.name))
        axes = tuple(axis for axis in axes if axis != pair.name)
        probs = pair.probs(own if logits else own.clamp_min(torch.finfo(own.dtype).tiny).log(), beside)
    else:
        probs, own = (leaf.softmax(-1) if logits else leaf), leaf

    def average(values: Tensor) -> Tensor:
        if committee is not None and committee.axis in axes:
            values = committee.weighed(values, axes.index(committee.axis))
        return values.flatten(0, len(axes) - 1).mean(0)

    if axes:
        mean = average(probs)
        y = mean.clamp_min(torch.finfo(mean.dtype).tiny).log() if logits else mean
    else:
        mean, y = probs, own
    if not return_risk:
        return y, {}
    total, each = _entropy(mean), _entropy(probs)
    aleatoric = average(each) if axes else each
    out = {"aleatoric": aleatoric, "total": total}
    if axes:
        out["epistemic"] = (total - aleatoric).clamp_min(0)
    return y, out


def _entropy(probs: Tensor) -> Tensor:
    """In nats over the last dimension; the gradient at a probability of zero is zero, not infinite."""
    return torch.special.entr(probs.clamp_min(torch.finfo(probs.dtype).tiny)).sum(-1)


def pair_of(record: Any, axes: tuple[str, ...]) -> Any:
    """The method among these axes whose second branch only stands beside the model's own, if there is one."""
    for method in record.methods:  # a plain loop: torch.compile cannot trace a comprehension that assigns
        axis = method.axis(Call(False, True))
        if axis is not None and axis.own_first and axis.name in axes:
            return method
    return None


def _majority(record: Any, axes: tuple[str, ...], leaf: Tensor) -> Tensor:
    """Whole numbers and truth values: what most of the models say; a risk head has no say."""
    if (pair := pair_of(record, axes)) is not None:
        leaf = leaf.select(axes.index(pair.name), 0)
        axes = tuple(axis for axis in axes if axis != pair.name)
    if not axes:
        return leaf
    flat = leaf.flatten(0, len(axes) - 1)
    return flat[0] if flat.shape[0] == 1 else flat.to(torch.int64).mode(0).values.to(leaf.dtype)


def _warn_nan(wrapped: Any, args: tuple, risks: Any) -> None:
    if "nan" in wrapped._workbench.told or values_unavailable():
        return
    leaves = [leaf for leaf in tensors(list(risks.values()) if isinstance(risks, dict) else risks) if is_float(leaf)]
    # elsewhere than on the CPU it would make every call wait; a sum is NaN if a summand is, or where infinities meet
    if any(
        leaf.device.type == "cpu" and math.isnan(leaf.detach().sum()) and bool(leaf.isnan().any()) for leaf in leaves
    ):
        rows = [int(x.flatten(1).isnan().any(1).sum()) for x in tensors(args) if is_float(x) and x.dim() > 1]
        tell(
            wrapped,
            "nan",
            f"the risk is NaN in some rows; {max(rows, default=0)} rows of the input hold NaN. Other rows are not affected",
        )


# ---- training
def loss(wrapped: Any, criterion: Callable[[Any, Any], Tensor], args: tuple, kwargs: dict[str, Any], y: Any) -> Tensor:
    """See `Wrapped.loss`."""
    record, scaling = wrapped._workbench, extra(wrapped, "scaling")
    if scaling is not None:
        args, y = scaling.inputs(args), scaling.targets(y)
    branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, True, loss=True)), args, kwargs)
    axes = branched.axes
    pair = pair_of(record, axes)
    if pair is not None and axes[-1] != pair.name:
        raise RuntimeError(
            f"{pair.name} has an axis with own_first, which must be the innermost one (its `order` the highest)"
        )
    sizes = next(leaf.shape[: len(axes)] for leaf in branched.leaves if isinstance(leaf, Tensor))
    models = sizes[:-1] if pair is not None else sizes
    terms: list[Tensor] = []
    for k in range(int(torch.Size(models).numel())):
        at = [
            leaf.reshape(-1, *leaf.shape[len(models) :])[k] if isinstance(leaf, Tensor) else leaf
            for leaf in branched.leaves
        ]
        if pair is None:
            terms.append(criterion(branched.rebuild(at), y))
            continue
        prediction = branched.rebuild([leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in at])
        beside = branched.rebuild([apart(leaf, 0)[1] if is_float(leaf) else leaf for leaf in at])
        terms.append(criterion(prediction, y) + pair.likelihood(y, prediction, beside))
    total = torch.stack(terms).mean()
    for method in record.methods:
        if (term := method.regularizer(table_of(wrapped), record.rows)) is not None:
            total = total + term
    return total


def quantiles(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """See `Wrapped.quantiles`."""
    record, scaling = wrapped._workbench, extra(wrapped, "scaling")
    if scaling is not None:
        args = scaling.inputs(args)
    branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, True)), args, kwargs)
    pair = pair_of(record, branched.axes)

    def levels_of(leaf: Any) -> Tensor | None:
        if pair is None or not is_float(leaf):
            return None
        levels = pair.quantiles(*apart(leaf, branched.axes.index(pair.name)))
        others = tuple(range(1, len(branched.axes)))  # voters and samples, behind the levels
        return levels if levels is None or not others else levels.mean(others)

    out = [levels_of(leaf) for leaf in branched.leaves]
    if all(leaf is None for leaf in out):
        raise ValueError("the model has no quantile heads: wrap it with sculpt.Wrapper(Quantiles(levels))")
    return branched.rebuild(out if scaling is None else [scaling.prediction(leaf) for leaf in out])


def fit(wrapped: Any, inputs: Any) -> None:
    """See `Wrapped.fit`."""
    methods = wrapped._workbench.methods
    if not any(method.needs_fit for method in methods):
        names = [method.name for method in methods] or ["compose() without wrappers"]
        raise ValueError(
            f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} nothing to fit in closed form; "
            "to train the model call workbench.fit(wrapped, data)"
        )
    for method in methods:
        method.fit(wrapped, inputs)
