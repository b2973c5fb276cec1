"""Calls of a wrapped object: plan, prediction, loss, quantiles and closed-form fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.combine import Ragged
from ...engine.effects.inputs import may_change, own_inputs
from ...engine.effects.random import values_unavailable
from ...engine.plan import Bank, Plan
from ...engine.request import Receiver
from ...engine.results import Running
from ...engine.run import Branched, NotDealableError
from ...engine.state import BranchedState, of_one_branch, states_in
from ...engine.tree import children, is_float, map_tensors, names, tensors
from ...risk import Risk
from ..additions import extra
from ..batches.dealing import NO_ROWS, NUMBER, deal, rows_of, tell, tell_whole
from ..batches.dealt_graphs import DealtGraphs
from ..batches.dict_rows import as_inputs
from ..batches.row_weights import weighed
from ..crossfit import committee_of
from ..fitted_weights import FittedWeights, warn_if_trained
from ..joint_loss import joined
from ..layer_order import check_tails
from ..method import Call, split_heads
from ..outputs.detections import ragged_leaves
from ..outputs.meanings import Meaning, Values
from ..outputs.options import has_classes, has_detections
from ..outputs.resolution import resolve, targets_of
from ..outputs.slips import listening, refuse_class_numbers, warn_unsaid
from ..outputs.transformed_losses import refuse_transformed
from ..ownership import engine_of, table_of
from ..prior import run_with_prior
from ..reached_outputs import check_reached
from .bounded_ends import tell_bounded_end, undo_ends
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
        tell_bounded_end(
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
        tell_whole(wrapped, "mixed", _why_not_dealt(error, branched))
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
    if "nan" in wrapped._workbench.told or values_unavailable():
        return
    values = tensors(list(risks.values()) if isinstance(risks, dict) else risks)
    leaves = {id(leaf): leaf for leaf in values if is_float(leaf)}.values()  # the total may be another risk
    # on the CPU only, since elsewhere the test would synchronize the device. The sum is a cheap first test: it is NaN if an element is
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
def loss(
    wrapped: Any, criterion: Callable[[Any, Any], Tensor] | None, args: tuple, kwargs: dict[str, Any], y: Any
) -> Tensor:
    """See `Wrapped.loss`."""
    check_criterion(criterion)
    if (scaling := extra(wrapped, "scaling")) is not None:
        (args, kwargs), y = scaling.inputs(args, kwargs), scaling.targets(y)
    branched, _ = run(wrapped, plan_of(wrapped, Call(wrapped.training, True, loss=True)), args, kwargs)
    return loss_of_branches(wrapped, branched, criterion, args, kwargs, y)


def loss_of_branches(
    wrapped: Any,
    branched: Branched,
    criterion: Callable[[Any, Any], Tensor] | None,
    args: tuple,
    kwargs: dict[str, Any],
    y: Any,
) -> Tensor:
    """Return the loss of the outputs of all branches for these inputs; see `Wrapped.loss`."""
    together = False
    if not torch.compiler.is_compiling():  # compiled separate calls are as fast, and Dynamo cannot trace these checks
        ladder = engine_of(wrapped).ladder
        together = ladder.in_one_pass or ladder.is_little(tensors((args, kwargs)))
    losses = losses_of_models(wrapped, branched, criterion, args, kwargs, y, together)
    total = losses.mean() if losses.dim() else losses
    record = wrapped._workbench
    for method in record.methods:
        if (term := method.regularizer(table_of(wrapped), record.rows)) is not None:
            total = total + term
    return total


def losses_of_models(
    wrapped: Any,
    branched: Branched,
    criterion: Callable[[Any, Any], Tensor] | None,
    args: tuple,
    kwargs: dict[str, Any],
    y: Any,
    together: bool = False,
    first: int = 0,
) -> Tensor:
    """Return the losses [models], whose mean is the loss without regularizers.

    Args:
        wrapped: the wrapped object.
        branched: outputs of the branches of some models.
        criterion, args, kwargs, y: as for `loss`.
        together: whether one call of the criterion may give the mean [] instead.
        first: position of the first of these models along the outermost axis.
    """
    record, axes = wrapped._workbench, branched.axes
    if criterion is not None:
        refuse_transformed(wrapped, criterion, axes)
    pair = pair_of(record, axes)
    refuse_class_numbers(wrapped, pair, y, branched.leaves, len(axes))
    warn_unsaid(wrapped, criterion, y, branched.leaves, len(axes))
    leaves = weighed(wrapped, axes, branched.leaves, (args, kwargs), y, first)
    if pair is None and criterion is None:
        raise ValueError(
            "criterion: without sculpt there is no likelihood to train by; give criterion(prediction, target)"
        )
    if pair is not None and axes[-1] != pair.name:
        raise RuntimeError(
            f"{pair.name} has an axis with own_first, which must be the innermost one (its `order` the highest)"
        )
    sizes = branched.sizes()
    models = sizes[:-1] if pair is not None else sizes
    joint = joined(record, models, leaves, criterion, y, pair) if together else None
    # wrapped after `joined`, which would not recognize the wrapped criterion
    criterion = listening(wrapped, criterion, y)
    if joint is not None:
        rows, targets = joint
        return loss_of_model(record, branched.rebuild, [rows], criterion, targets, pair)
    losses = _losses(record, branched.rebuild, models, leaves, criterion, y, pair)
    if record.losses is not None:
        record.losses.append((dict(zip(axes, models, strict=False)), losses.detach()))
    return losses


def _losses(
    record: Any,
    rebuild: Callable[[list[Any]], Any],
    models: Sequence[int],
    leaves: Sequence[Any],
    criterion: Any,
    y: Any,
    pair: Any,
) -> Tensor:
    """Return the losses of all models, in their order."""
    answers = [_of_models(leaf, models) for leaf in leaves]
    terms = [
        loss_of_model(record, rebuild, [of_leaf[k] for of_leaf in answers], criterion, y, pair)
        for k in range(math.prod(models))
    ]
    return torch.stack(terms)


def _of_models(leaf: Any, models: Sequence[int]) -> Sequence[Any]:
    """Split a leaf [*models, ...] into one leaf per model.

    By one `unbind`, since the backward pass of a `select` per model would fill a tensor as large as those of all models.
    """
    if isinstance(leaf, Ragged):
        return leaf.items
    if not isinstance(leaf, Tensor):
        return [leaf] * math.prod(models)
    # cloned, since a criterion may write into its arguments and torch forbids writes into views of unbind
    return [answer.clone() for answer in leaf.reshape(math.prod(models), *leaf.shape[len(models) :]).unbind(0)]


def loss_of_model(
    record: Any, rebuild: Callable[[list[Any]], Any], leaves: list[Any], criterion: Any, y: Any, pair: Any
) -> Tensor:
    """Return the training loss of one model: the criterion plus the negative log-likelihood of its risk heads.

    Args:
        record: the record of the wrapping.
        rebuild: function from leaves to an output of the model's structure.
        leaves: leaves of the output, with the axis of the heads in front if there is a pair.
        criterion: `criterion(prediction, target)`, None for the likelihood alone.
        y: the target.
        pair: the method of the risk heads, None if there is none.
    """
    if pair is None:
        return _tensor_of(criterion(rebuild(leaves), y))
    if y is None:
        raise ValueError(
            f"{pair.name}: the risk heads are trained by the likelihood of a target, and y is None: give the target of the output that has a "
            "risk (for an autoencoder the input), as in wrapped.loss(criterion, x, y), and compute the rest of the loss in the criterion"
        )
    split = [split_heads(leaf, 0) if is_float(leaf) else (leaf, leaf) for leaf in leaves]
    predictions = [leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    prediction = rebuild(predictions)
    tree_names = names(prediction)
    meanings = resolve(record.output, lambda: tree_names, predictions, 0)
    same_structure = children(y) is not None or children(prediction) is None  # otherwise y is the target of one output
    all_values = same_structure and all(meaning is None or isinstance(meaning, Values) for meaning in meanings)
    if all_values and not any(isinstance(leaf, BranchedState) for leaf in leaves):
        likelihood = pair.likelihood(y, prediction, rebuild([heads for _, heads in split]))
    else:
        targets = targets_of(y, tree_names, meanings)
        if all(target is None for target in targets):
            raise ValueError(
                f"{pair.name}: y holds a target for none of the outputs, and nothing would train the risk heads; the outputs are "
                f"{', '.join(map(repr, tree_names))}"
            )
        terms = [
            pair.likelihood(target, *pairs, meaning)
            for target, pairs, meaning in zip(targets, split, meanings, strict=True)
            if target is not None
        ]
        likelihood = torch.stack(terms).mean()
    if criterion is None:
        return likelihood
    scored = [
        pair.prediction(*heads) if isinstance(meaning, Values) else leaf
        for heads, meaning, leaf in zip(split, meanings, predictions, strict=True)
    ]
    return _tensor_of(criterion(rebuild(scored), y)) + likelihood


def check_criterion(criterion: Any) -> None:
    """Raise TypeError if a criterion is no function of prediction and target, or a class of losses instead of an object of it."""
    if isinstance(criterion, type) and issubclass(criterion, nn.Module):
        raise TypeError(
            f"criterion: found the class {criterion.__name__}; give an object of it, {criterion.__name__}()"
        )
    if criterion is not None and not callable(criterion):
        code = f"a {type(criterion).__name__}" if isinstance(criterion, Tensor) else f"{criterion!r:.100}"
        raise TypeError(
            f"criterion: found {code}; give a function of prediction and target, as in wrapped.loss(nn.MSELoss(), x, y)"
        )


def _tensor_of(loss: Any) -> Tensor:
    """Return the loss; a number would add to the likelihood without a gradient."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"criterion: it returned {type(loss).__name__}; it must return the loss as a tensor, without .item()"
        )
    return loss


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
