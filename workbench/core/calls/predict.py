"""Calls of a wrapped object: plan, prediction, quantiles and closed-form fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...engine.effects.inputs import may_change, own_inputs
from ...engine.effects.random import values_unavailable
from ...engine.plan import Bank, Plan
from ...engine.request import Receiver
from ...engine.results import Running
from ...engine.run import Branched, NotDealableError
from ...engine.state import of_one_branch, states_in
from ...engine.tree import is_float, map_tensors, names, tensors
from ...risk import Risk
from ..additions import extra
from ..batches.dealing import NO_ROWS, NUMBER, deal, rows_of, warn_not_dealt
from ..batches.dealt_graphs import DealtGraphs
from ..batches.dict_rows import as_inputs
from ..crossfit import committee_of
from ..fitted_weights import FittedWeights, warn_if_trained
from ..layer_order import check_tails
from ..method import Call, split_heads
from ..outputs.detections import ragged_leaves
from ..outputs.meanings import Meaning, Values
from ..outputs.options import has_classes, has_detections
from ..ownership import engine_of, table_of
from ..prior import run_with_prior
from ..reached_outputs import check_reached
from ..single_warnings import warn_once
from .bounded_ends import undo_ends, warn_of_bounded_end
from .feedback import carries_mean, mark_means, refuse_means
from .risks import meanings_of, pair_of, reduced
from .running_moments import folding_of


# ---- the plan of a call
def plan_of(
    wrapped: Any, call: Call, rows: Sequence[Tensor] | Tensor | None = None, graphs: DealtGraphs | None = None
) -> Plan:
    """Return the plan of a call.

    Args:
        wrapped: the wrapped object.
        call: the request.
        rows: row numbers that each branch answers if rows are dealt, see `Plan.rows`.
        graphs: the graphs among the inputs if these are dealt instead of rows of tensors.
    """
    record, table = wrapped._workbench, table_of(wrapped)
    axes = tuple(axis for axis in [method.axis(call) for method in record.methods] if axis is not None)
    interventions = tuple(i for i in [method.intervention(table, call) for method in record.methods] if i is not None)
    separate = any(axis.apart for axis in axes)
    looped = 'purity="allow" lets each pass see what the one before it changed' if record.purity == "allow" else ""
    looped = looped or ("each voter is given graphs of its own" if graphs is not None else "")
    return Plan(
        axes,
        record.rules,
        Bank(table.get),
        interventions,
        shares_trunk=not separate and not call.dealt and table.has_trunk(tuple(axis.name for axis in axes)),
        loop_only=next((i.loop_only for i in interventions if i.loop_only), looped),
        dealt=next(method.name for method in record.methods if method.deals(True, True)) if call.dealt else "",
        rows=() if rows is None else rows,
        cut=None if graphs is None else graphs.cut,
        parts=() if graphs is None or rows is None else graphs.parts(rows),
        chunk=record.chunk,
        purity=record.purity,
        state=record.state or (),
        ragged=ragged_leaves(record.output),
    )


def run(
    wrapped: Any, plan: Plan, args: tuple, kwargs: dict[str, Any], receiver: Callable[[], Receiver] | None = None
) -> tuple[Branched, Sequence[Any]]:
    """Run a plan, checking inputs and the order of layers; return the outputs of all branches and the result of each; see `Engine.run`."""
    if not torch.compiler.is_dynamo_compiling():
        refuse_means(wrapped, args, kwargs)
    elif carries_mean(args, kwargs):
        from .outside_graph import refuse_means_outside

        refuse_means_outside(wrapped, args, kwargs)
    branched, results = run_with_prior(wrapped, plan, args, kwargs, wrapped._workbench.strategy, receiver)
    for intervention in plan.interventions:
        if intervention.plain_dtypes:
            branched.plain_dtypes = {**branched.plain_dtypes, **intervention.plain_dtypes}
    check_tails(wrapped, args, kwargs)
    check_reached(wrapped, branched, args, kwargs)
    complete(wrapped, branched)
    if (observe := wrapped.__dict__["_engine"].observe) is not None:
        observe(branched)
    return branched, results


def complete(wrapped: Any, branched: Branched) -> None:
    """Let risk heads end as if the model ended in its last layer, or warn that they do not."""
    if wrapped.training and torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
        depth = len(branched.axes)
        warn_of_bounded_end(
            wrapped, branched.leaves, lambda: names(branched.rebuild(branched.leaves)), depth, branched.axes
        )
    undo_ends(wrapped, branched)


# ---- prediction
def predict(wrapped: Any, args: tuple, kwargs: dict[str, Any], return_risk: bool, tile_and_reduce: bool | None) -> Any:
    """See `Wrapped.forward`."""
    record, scaling = wrapped._workbench, extra(wrapped, "scaling")
    # the number of boxes depends on values, which a compiled graph does not know
    if torch.compiler.is_dynamo_compiling() and (has_detections(record.output) or record.walks_parameters):
        from ...engine.executors import graph_break

        return graph_break.outside(predict, wrapped, args, kwargs, return_risk, tile_and_reduce)
    raw_args = args
    if scaling is not None:
        args, kwargs = scaling.inputs(args, kwargs)
    measuring = [method for method in record.methods if method.own_pass] if return_risk else []
    if return_risk:
        for method in record.methods:
            method.check_ready(wrapped)
        warn_if_trained(wrapped)
    if measuring and len(record.methods) == 1 and not may_change(engine_of(wrapped).effects, args, kwargs):
        y, risk = measuring[0].measure(wrapped, args, kwargs)
        y = of_one_branch(y, record.state or ())
        _warn_nan(wrapped, raw_args, risk)
        return (scaling.prediction(y) if scaling is not None else y), risk
    rows = graphs = None
    n = max([method.deals(wrapped.training, tile_and_reduce is False) for method in record.methods], default=0)
    if has_detections(record.output):
        n = 0  # no row of the output answers a row of the input
    if n and not tile_and_reduce and (tile_and_reduce is False or not return_risk):
        states = states_in((args, kwargs))
        graphs = None if states else DealtGraphs.of(wrapped, args, kwargs)
        table = table_of(wrapped)
        rows = rows_of(wrapped, states, args, kwargs) if states else deal(wrapped, table, n, args, kwargs, graphs)
    call = Call(wrapped.training, return_risk, dealt=rows is not None)
    probe = (args, kwargs)
    asks = return_risk and not wrapped.training and not call.dealt
    # not inside an if block, where Dynamo cannot trace a comprehension under Python 3.12
    refining = [method for method in record.methods if asks and method.refines]
    if measuring or refining:  # copies, since the model may write into its inputs in this call
        probe = own_inputs(map_tensors(lambda t: t.clone(), probe))
    plan = plan_of(wrapped, call, rows, graphs if call.dealt else None)
    if not call.dealt:
        plan.folding = folding_of(wrapped, plan.axes, committee_of(wrapped), return_risk)
    try:
        branched, _ = run(wrapped, plan, args, kwargs)
        record.dealt = record.dealt or call.dealt
    except Exception as error:
        # the first dealt call may fail because each branch sees some rows only; other errors are raised again without dealing
        if not call.dealt or ((record.dealt or _is_refusal(error)) and not isinstance(error, NotDealableError)):
            raise
        branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, return_risk)), args, kwargs)
        record.dealable = False
        warn_not_dealt(wrapped, "mixed", _why_not_dealt(error, branched))
    if plan.folding is not None and not any(isinstance(leaf, Running) for leaf in branched.leaves):
        # bitwise the same result as in calls whose executor folds the branches
        branched.leaves = plan.folding()(branched.leaves, branched.rebuild)
    y, risks = reduced(wrapped, branched, return_risk, scaling)
    mark_means(wrapped, plan, y)
    if not return_risk:
        return y
    for method in refining:
        risks = method.refine(wrapped, *probe, y, risks)
    for method in measuring:
        risks[method.kind] = method.measure(wrapped, *probe)[1]
    _warn_nan(wrapped, raw_args, risks)
    measured = [name for name in risks if name != "total"]
    if len(record.methods) == 1 and len(measured) == 1 and not has_classes(record.output):
        return y, risks[measured[0]]
    return y, Risk(**risks)


def _is_refusal(error: Exception) -> bool:
    """Return whether an error was raised by this package, not by the model."""
    traceback: Any = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("workbench.")


def _why_not_dealt(error: Exception, branched: Branched) -> str:
    if isinstance(error, NotDealableError):
        return str(error) or NO_ROWS
    if all(leaf.dim() == len(branched.axes) for leaf in branched.leaves if is_float(leaf)):
        return NUMBER
    return f"the model does not take some rows of a batch by themselves ({type(error).__name__}: {error})"


def _warn_nan(wrapped: Any, args: tuple, risks: Any) -> None:
    if "nan" in wrapped._workbench.warned or values_unavailable():
        return
    values = tensors(list(risks.values()) if isinstance(risks, dict) else risks)
    leaves = {id(leaf): leaf for leaf in values if is_float(leaf)}.values()  # the total may be another risk
    # on the CPU only, since elsewhere the test would synchronize the device. The sum is a cheap first test: it is NaN if an element is
    if any(
        leaf.device.type == "cpu" and math.isnan(leaf.detach().sum()) and bool(leaf.isnan().any()) for leaf in leaves
    ):
        rows = [int(x.flatten(1).isnan().any(1).sum()) for x in tensors(args) if is_float(x) and x.dim() > 1]
        warn_once(
            wrapped,
            "nan",
            f"the risk is NaN in some rows; {max(rows, default=0)} rows of the input hold NaN. Other rows are not affected",
        )


def quantiles(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """See `Wrapped.quantiles`."""
    record, scaling = wrapped._workbench, extra(wrapped, "scaling")
    if scaling is not None:
        args, kwargs = scaling.inputs(args, kwargs)
    branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, True)), args, kwargs)
    pair = pair_of(record, branched.axes)

    def levels_of(leaf: Any, meaning: Meaning | None) -> Tensor | None:
        if pair is None or not isinstance(meaning, Values):
            return None
        levels = pair.quantiles(*split_heads(leaf, branched.axes.index(pair.name)))
        model_dims = tuple(range(1, len(branched.axes)))  # axes of voters and samples, after that of the levels
        return levels if levels is None or not model_dims else levels.mean(model_dims)

    out = [levels_of(*pairs) for pairs in zip(branched.leaves, meanings_of(record, branched), strict=True)]
    if all(leaf is None for leaf in out):
        raise ValueError("the model has no quantile heads: wrap it with sculpt.Wrapper(Quantiles(levels))")
    return branched.rebuild(out if scaling is None else [scaling.prediction(leaf) for leaf in out])  # None is kept


def fit(wrapped: Any, inputs: Any) -> None:
    """See `Wrapped.fit`."""
    methods = wrapped._workbench.methods
    if not any(method.needs_fit for method in methods):
        names = [method.name for method in methods] or ["compose() without wrappers"]
        raise ValueError(
            f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} nothing to fit in closed form; "
            "to train the model call workbench.fit(wrapped, data)"
        )
    inputs = as_inputs(inputs)
    for method in methods:
        method.fit(wrapped, inputs)
    wrapped._workbench.fitted_weights = FittedWeights(wrapped)
