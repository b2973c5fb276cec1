"""Deal the rows of a batch out to voters, so that each trains on its own share at the cost of one pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.effects.branch_values import duplicate
from ...engine.effects.inputs import is_object
from ...engine.plan import Bank, Plan
from ...engine.state import BranchedState
from ...engine.tree import flatten, is_float, paths, tensors
from ...errors import WorkbenchWarning
from ...introspect.objects import is_graph
from ...introspect.source_lines import user_stacklevel
from ..method import evaluating
from ..ownership import Table, engine_of
from .dealt_graphs import DealtGraphs

WHOLE = (
    "so the loss is now that of the mean of the voters, not of each voter: wrapped.loss(criterion, x, y) trains each voter on every row, and "
    "tile_and_reduce=True says that the mean is meant"
)

OWN_LOSS = (
    "so every voter answers every row: that number is the mean of what each of them gives, so that each has a gradient of its own, while a loss "
    "that is computed of other outputs is that of the mean of the voters: wrapped.loss(criterion, x, y) trains each voter on every row"
)
MIXED = "the rows of a batch depend on each other in this model"
NO_ROWS = "the output has no row for each row of the input"
NUMBER = "the model gives a number for all rows of a batch, as those do that compute a loss of their labels"


def tell(wrapped: Any, key: str, message: str) -> None:
    """Warn once for each wrapped object and key, with the user's line."""
    if key not in wrapped._workbench.told:
        wrapped._workbench.told.add(key)
        # Dynamo does not follow frames
        level = 5 if torch.compiler.is_dynamo_compiling() else user_stacklevel()
        warnings.warn(message, WorkbenchWarning, stacklevel=level)


def tell_whole(wrapped: Any, key: str, why: str) -> None:
    """Warn once for each key that the mean of all voters answers, where rows were to be dealt out."""
    tell(wrapped, key, f"vote: {why}, {OWN_LOSS if why.startswith(NUMBER) else WHOLE}")


def deal(
    wrapped: Any, table: Table, n: int, args: tuple, kwargs: dict[str, Any], graphs: DealtGraphs | None = None
) -> list[Tensor] | None:
    """The rows (or graphs) for each of n voters, evenly and at random; None, with one warning, where they can't be dealt out.

    They can't where inputs have no common number of rows, where there are fewer than a voter needs (batch norm: two), and where rows depend
    on each other (sequences along the first axis), which one comparison at the first call finds out.
    """
    leaves = tensors((args, kwargs))
    if any(leaf.is_cuda for leaf in leaves) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "vote: rows are dealt out anew at each call, on the CPU, but a CUDA graph would deal the same ones at each replay. Capture "
            "wrapped.loss, which asks all voters, or call with tile_and_reduce=True"
        )
    if torch.compiler.is_exporting():
        raise RuntimeError(
            "vote: in training mode rows are dealt out to the voters at random, which torch.export cannot take: export after wrapped.eval(), or "
            'for training the mean of all voters, torch.export.export(wrapped, (x,), {"tile_and_reduce": True})'
        )
    stack = () if torch.compiler.is_compiling() else torch._C._functorch.get_interpreter_stack() or ()
    if any(interpreter.key() == torch._C._functorch.TransformType.Vmap for interpreter in stack):
        raise RuntimeError(
            "vote: in training mode rows are dealt out to the voters, which cannot be done inside torch.func.vmap; call with "
            "tile_and_reduce=True, which asks all voters, or after wrapped.eval()"
        )
    lengths = {leaf.shape[0] for leaf in leaves if leaf.dim()} if graphs is None else {graphs.count}
    if len(lengths) != 1:
        one = any(is_graph(leaf) for leaf in flatten((args, kwargs))[0])
        why = (
            "the input is one graph, whose nodes answer together" if one else "the inputs have no common number of rows"
        )
        tell_whole(wrapped, "deal", why)
        return None
    count, kind = lengths.pop(), "row" if graphs is None else "graph"
    norms = any(
        (isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "normalizes_batch", False))
        and module.training
        for module in wrapped.modules()
    )
    least = 2 if norms else 1
    if count < n * least:
        few = f"{count} {kind if count == 1 else f'{kind}s'}"
        tell_whole(wrapped, "small", f"a batch of {few} is too small to deal {least} to each of {n} voters")
        return None
    parts = torch.randperm(count).tensor_split(n)
    rows = list(parts)
    if count % n:  # or the rest would always fall to the first
        rows = [parts[i] for i in torch.randperm(n).tolist()]
    if graphs is not None:
        rows = [numbers.sort().values for numbers in rows]
    record = wrapped._workbench
    if record.dealable is None and n > 1:
        why = _dependence(wrapped, table, rows[0], count, args, kwargs, graphs)
        record.dealable = not why
        if why:
            tell_whole(wrapped, "mixed", why)
    if record.dealable is False:
        tell_whole(wrapped, "mixed", MIXED)  # of one that was pickled; else it is told by now
        return None
    return rows


def rows_of(
    wrapped: Any, states: Sequence[BranchedState], args: tuple, kwargs: dict[str, Any]
) -> Sequence[Tensor] | Tensor | None:
    """The rows for each voter in a call that goes on from states: those that it answered before; None where all answered all of them."""
    rows = states[0].rows
    if rows is None:
        tell_whole(wrapped, "state", "the state comes from a call in which every voter answered all rows")
        return None
    count = sum(map(len, rows))
    lengths = sorted({leaf.shape[0] for leaf in tensors((args, kwargs)) if leaf.dim()})
    if lengths != [count]:
        raise ValueError(
            f"the state comes from a batch of {count} rows, which were dealt out to the voters, and these inputs have {lengths}: start a batch "
            "of other rows without a state, or call with tile_and_reduce=True"
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
    """Why one voter, in evaluation mode, may answer some rows otherwise alone than among all; "" if it does not."""
    leaves, rebuild = flatten((args, kwargs))
    sources = engine_of(wrapped).clones.sources(leaves)
    before = sources.all()

    def answers(inputs: list[Any]) -> dict[str, Tensor]:
        record = wrapped._workbench
        plan = Plan((), record.rules, Bank(table.get), keep_state=False, state=record.state or ())
        branched, _ = engine_of(wrapped).run(plan, *rebuild(inputs))
        places = paths(branched.rebuild(branched.leaves))
        return {place: leaf for place, leaf in zip(places, branched.leaves, strict=True) if is_float(leaf)}

    copies = [duplicate(leaf) if isinstance(leaf, Tensor) or is_object(leaf) else leaf for leaf in leaves]
    kinds = [(count, rows)]  # how many of a kind there are, and which of them the voter is given
    if graphs is None:
        chosen = [
            leaf.index_select(0, rows.to(leaf.device)) if isinstance(leaf, Tensor) and leaf.dim() else leaf
            for leaf in copies
        ]
    else:
        chosen = graphs.cut(copies, rows)
        kinds += [(len(owner), places) for owner, (places,) in zip(graphs.owners, graphs.parts([rows]), strict=True)]
    with torch.no_grad(), evaluating(wrapped):
        try:
            among = answers(copies)  # what is wrong with the inputs is the model's to say
            try:
                alone = answers(chosen)
            except Exception:  # it does not take fewer rows
                return MIXED
            if among.keys() != alone.keys():
                return MIXED
            if scalars := [place for place, whole in among.items() if not whole.dim()]:
                return f"{NUMBER} ({', '.join(scalars)})"
            answered = {
                place: [numbers for n, numbers in kinds if (len(whole), len(alone[place])) == (n, len(numbers))]
                for place, whole in among.items()
            }
            for place, whole in among.items():
                if not answered[place]:
                    return f"{NO_ROWS} ({place} is {list(whole.shape)} for {count} {'rows' if graphs is None else 'graphs'})"
            if all(
                any(_alike(whole[numbers.to(whole.device)], alone[place]) for numbers in answered[place])
                for place, whole in among.items()
            ):
                return ""
            # a model that draws random numbers in evaluation mode answers otherwise each time, whatever the rows
            again = answers(copies)
            return MIXED if all(_alike(whole, again[place]) for place, whole in among.items()) else ""
        finally:
            sources.restore(before)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.01, atol=0.01 * float(_size(a)), equal_nan=True)


def _size(leaf: Tensor) -> Tensor:
    """The root mean square of what is finite."""
    finite = leaf[leaf.isfinite()]
    return finite.abs().square().mean().sqrt() if finite.numel() else torch.zeros(())
