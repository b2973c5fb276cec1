"""Dealing of rows to voters: each voter trains on its own share of a batch, at the cost of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.effects.branch_values import duplicate
from ...engine.effects.inputs import is_object
from ...engine.plan import Bank, Plan
from ...engine.state import BranchedState
from ...engine.surroundings import is_exporting
from ...engine.tree import flatten, is_float, paths, tensors
from ...introspect.objects import is_graph
from ..method import evaluating
from ..ownership import Table, engine_of
from ..single_warnings import warn_once
from .dealt_graphs import DealtGraphs
from .kept_rows import kept_by_row

WHOLE = (
    "so the loss is now that of the mean of the voters, not of each voter: wrapped.loss(criterion, x, y) trains each voter on every row; pass "
    "tile_and_reduce=True if the mean is intended"
)

OWN_LOSS = (
    "so every voter answers every row: that number is the mean over voters, so that each voter has its own gradient, while a loss computed from "
    "other outputs is that of the mean of the voters: wrapped.loss(criterion, x, y) trains each voter on every row"
)
MIXED = "the rows of a batch depend on each other in this model"
KEPT = "{name} keeps a value for each row until the next call, in which other rows would be dealt to a voter"
NO_ROWS = "the output has no row for each row of the input"
NUMBER = "the model gives a number for all rows of a batch, as models do that compute their own loss from labels"


def warn_not_dealt(wrapped: Any, key: str, why: str) -> None:
    """Warn once per key that the mean of all voters is returned although rows should have been dealt out."""
    warn_once(wrapped, key, f"vote: {why}, {OWN_LOSS if why.startswith(NUMBER) else WHOLE}")


def deal(
    wrapped: Any, table: Table, n: int, args: tuple, kwargs: dict[str, Any], graphs: DealtGraphs | None
) -> list[Tensor] | None:
    """Draw the rows (or graphs) for each voter at random, in equal shares.

    Rows cannot be dealt if inputs have no common number of rows, if there are fewer than each voter needs (two with batch norm), or if rows
    depend on each other (sequences along the first axis), which is tested once, at the first call.

    Args:
        wrapped: the wrapped object.
        table: its ownership table.
        n: number of voters.
        args, kwargs: inputs of the model.
        graphs: graphs among the inputs, which are then dealt instead of rows.

    Returns:
        For each voter int64 row numbers; None, with a warning, if rows cannot be dealt.

    Raises:
        RuntimeError: inside a CUDA graph capture, torch.export or torch.func.vmap.
    """
    leaves = tensors((args, kwargs))
    _refuse_transforms(leaves)
    lengths = {leaf.shape[0] for leaf in leaves if leaf.dim()} if graphs is None else {graphs.count}
    if len(lengths) != 1:
        inputs = flatten((args, kwargs))[0]
        reason = "the inputs have no common number of rows"
        if any(is_graph(leaf) for leaf in inputs):
            reason = "the input is a single graph, whose nodes depend on each other"
        elif inputs and not lengths:
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in inputs}))
            reason = f"no input is a tensor with rows (found {kinds}; torch.as_tensor(x) makes a tensor of an array)"
        warn_not_dealt(wrapped, "deal", reason)
        return None
    count, kind = lengths.pop(), "row" if graphs is None else "graph"
    norms = any(
        (isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "normalizes_batch", False))
        and module.training
        for module in wrapped.modules()
    )
    min_rows = 2 if norms else 1
    if count < n * min_rows:
        size = f"{count} {kind if count == 1 else f'{kind}s'}"
        warn_not_dealt(wrapped, "small", f"a batch of {size} is too small to deal {min_rows} to each of {n} voters")
        return None
    parts = torch.randperm(count).tensor_split(n)
    rows = list(parts)
    if count % n:  # otherwise the larger parts would always go to the first voters
        rows = [parts[i] for i in torch.randperm(n).tolist()]
    if graphs is not None:
        rows = [numbers.sort().values for numbers in rows]
    record = wrapped._workbench
    if record.dealable is None and n > 1:
        reason = _dependence(wrapped, table, rows[0], count, args, kwargs, graphs)
        record.dealable = not reason
        if reason:
            warn_not_dealt(wrapped, "mixed", reason)
    if record.dealable is False:
        warn_not_dealt(wrapped, "mixed", MIXED)  # only issued for unpickled objects, otherwise the warning above was
        return None
    return rows


def _refuse_transforms(leaves: Sequence[Tensor]) -> None:
    """Raise RuntimeError inside a CUDA graph capture, torch.export or torch.func.vmap."""
    if any(leaf.is_cuda for leaf in leaves) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "vote: rows are dealt out anew at each call, on the CPU, but a CUDA graph would deal the same rows at each replay. Capture "
            "wrapped.loss, which trains all voters on every row, or call with tile_and_reduce=True"
        )
    if is_exporting():
        raise RuntimeError(
            "vote: in training mode rows are dealt out to the voters at random, which torch.export does not support: export after "
            'wrapped.eval(), or for training the mean of all voters, torch.export.export(wrapped, (x,), {"tile_and_reduce": True})'
        )
    stack = () if torch.compiler.is_compiling() else torch._C._functorch.get_interpreter_stack() or ()
    if any(interpreter.key() == torch._C._functorch.TransformType.Vmap for interpreter in stack):
        raise RuntimeError(
            "vote: in training mode rows are dealt out to the voters, which is not possible inside torch.func.vmap; call with "
            "tile_and_reduce=True, which averages all voters, or after wrapped.eval()"
        )


def rows_of(
    wrapped: Any, states: Sequence[BranchedState], args: tuple, kwargs: dict[str, Any]
) -> Sequence[Tensor] | Tensor | None:
    """Return the rows for each voter in a call that continues from states: those that it answered before; None if all answered all rows."""
    rows = states[0].rows
    if rows is None:
        warn_not_dealt(wrapped, "state", "the state comes from a call in which every voter answered all rows")
        return None
    count = sum(map(len, rows))
    lengths = sorted({leaf.shape[0] for leaf in tensors((args, kwargs)) if leaf.dim()})
    if lengths != [count]:
        raise ValueError(
            f"the state comes from a batch of {count} rows, which were dealt out to the voters, and these inputs have {lengths}: start new rows "
            "without a state, or call with tile_and_reduce=True"
        )
    return rows


def _dependence(
    wrapped: Any,
    table: Table,
    rows: Tensor,
    count: int,
    args: tuple,
    kwargs: dict[str, Any],
    graphs: DealtGraphs | None,
) -> str:
    """Test in evaluation mode whether one voter answers some rows differently alone than in the whole batch.

    Returns:
        The reason why rows cannot be dealt; "" if they can.
    """
    leaves, rebuild = flatten((args, kwargs))
    sources = engine_of(wrapped).clones.sources(leaves)
    random_state = sources.all()

    def answers(inputs: list[Any]) -> dict[str, Tensor]:
        record = wrapped._workbench
        plan = Plan((), record.rules, Bank(table.get), keep_state=False, state=record.state or ())
        branched, _ = engine_of(wrapped).run(plan, *rebuild(inputs))
        places = paths(branched.rebuild(branched.leaves))
        return {place: leaf for place, leaf in zip(places, branched.leaves, strict=True) if is_float(leaf)}

    copies = [duplicate(leaf) if isinstance(leaf, Tensor) or is_object(leaf) else leaf for leaf in leaves]
    kinds = [(count, rows)]  # (total number, numbers given to the voter) for rows or graphs, and for nodes and edges
    if graphs is None:
        # no tensor is saved for gradients: activation checkpointing counts them, and later calls have no such test
        with torch.no_grad():
            chosen = [
                leaf.index_select(0, rows.to(leaf.device)).requires_grad_(leaf.requires_grad)
                if isinstance(leaf, Tensor) and leaf.dim()
                else leaf
                for leaf in copies
            ]
    else:
        chosen = graphs.cut(copies, rows)
        kinds += [(len(owner), places) for owner, (places,) in zip(graphs.owners, graphs.parts([rows]), strict=True)]
    with torch.no_grad(), evaluating(wrapped):
        try:
            whole_batch = answers(copies)  # errors due to the inputs propagate to the user
            try:
                subset = answers(chosen)
            except Exception:  # the model does not accept fewer rows
                return MIXED
            if whole_batch.keys() != subset.keys():
                return MIXED
            if scalars := [place for place, whole in whole_batch.items() if not whole.dim()]:
                return f"{NUMBER} ({', '.join(scalars)})"
            answered = {
                place: [numbers for n, numbers in kinds if (len(whole), len(subset[place])) == (n, len(numbers))]
                for place, whole in whole_batch.items()
            }
            for place, whole in whole_batch.items():
                if not answered[place]:
                    return f"{NO_ROWS} ({place} is {list(whole.shape)} for {count} {'rows' if graphs is None else 'graphs'})"
            if all(
                any(alike(whole[numbers.to(whole.device)], subset[place]) for numbers in answered[place])
                for place, whole in whole_batch.items()
            ):
                if not engine_of(wrapped).clones.ever_impure:
                    return ""
                name = kept_by_row(wrapped, rebuild(chosen), rebuild(copies), lambda: sources.restore(random_state))
                return KEPT.format(name=name) if name else ""
            # a model that draws random numbers in evaluation mode gives different answers anyway, so the test is inconclusive
            again = answers(copies)
            return MIXED if all(alike(whole, again[place]) for place, whole in whole_batch.items()) else ""
        finally:
            sources.restore(random_state)


def alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two answers agree within a hundredth, of each number or of their root mean square."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.01, atol=0.01 * float(_size(a)), equal_nan=True)


def _size(leaf: Tensor) -> Tensor:
    """Return the root mean square of the finite elements."""
    finite = leaf[leaf.isfinite()]
    return finite.abs().square().mean().sqrt() if finite.numel() else torch.zeros(())
