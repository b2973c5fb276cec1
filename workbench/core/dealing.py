"""Deal the rows of a batch out to voters, so that each trains on its own share at the cost of one pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.effects.branch_values import duplicate
from ..engine.effects.inputs import is_object
from ..engine.plan import Bank, Plan
from ..engine.state import BranchedState
from ..engine.tree import flatten, is_float, tensors
from ..errors import WorkbenchWarning
from .method import evaluating
from .ownership import Table, engine_of

WHOLE = "so each step trains all voters on the whole batch; tile_and_reduce=True says that this is meant"


def tell(wrapped: Any, key: str, message: str) -> None:
    """Warn once for each wrapped object and key."""
    if key not in wrapped._workbench.told:
        wrapped._workbench.told.add(key)
        warnings.warn(message, WorkbenchWarning, stacklevel=5)


def deal(wrapped: Any, table: Table, n: int, args: tuple, kwargs: dict[str, Any]) -> list[Tensor] | None:
    """The rows for each of n voters, evenly and at random; None, with one warning, where rows can't be dealt out.

    They can't where inputs have no common number of rows, where there are fewer than a voter needs (batch norm: two), and where rows depend
    on each other (graphs, sequences along the first axis), which one comparison at the first call finds out.
    """
    leaves = tensors((args, kwargs))
    if any(leaf.is_cuda for leaf in leaves) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "vote: rows are dealt out anew at each call, on the CPU, but a CUDA graph would deal the same ones at each replay. Capture "
            "wrapped.loss, which asks all voters, or call with tile_and_reduce=True"
        )
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(interpreter.key() == torch._C._functorch.TransformType.Vmap for interpreter in stack):
        raise RuntimeError(
            "vote: in training mode rows are dealt out to the voters, which cannot be done inside torch.func.vmap; call with "
            "tile_and_reduce=True, which asks all voters, or after wrapped.eval()"
        )
    lengths = {leaf.shape[0] for leaf in leaves if leaf.dim()}
    if len(lengths) != 1:
        tell(wrapped, "deal", f"vote: the inputs have no common number of rows, {WHOLE}")
        return None
    count = lengths.pop()
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training for module in wrapped.modules())
    least = 2 if norms else 1
    if count < n * least:
        tell(
            wrapped,
            "small",
            f"vote: a batch of {count} rows is too small to deal {least} to each of {n} voters, {WHOLE}",
        )
        return None
    parts = torch.randperm(count).tensor_split(n)
    rows = list(parts)
    if count % n:  # or the rest would always fall to the first
        rows = [parts[i] for i in torch.randperm(n).tolist()]
    record = wrapped._workbench
    if record.dealable is None and n > 1:
        record.dealable = _independent(wrapped, table, rows[0], count, args, kwargs)
    if record.dealable is False:
        tell(wrapped, "mixed", f"vote: the rows of a batch depend on each other in this model, {WHOLE}")
        return None
    return rows


def rows_of(
    wrapped: Any, states: Sequence[BranchedState], args: tuple, kwargs: dict[str, Any]
) -> Sequence[Tensor] | Tensor | None:
    """The rows for each voter in a call that goes on from states: those that it answered before; None where all answered all of them."""
    rows = states[0].rows
    if rows is None:
        tell(wrapped, "state", f"vote: the state comes from a call in which every voter answered all rows, {WHOLE}")
        return None
    count = sum(map(len, rows))
    lengths = sorted({leaf.shape[0] for leaf in tensors((args, kwargs)) if leaf.dim()})
    if lengths != [count]:
        raise ValueError(
            f"the state comes from a batch of {count} rows, which were dealt out to the voters, and these inputs have {lengths}: start a batch "
            "of other rows without a state, or call with tile_and_reduce=True"
        )
    return rows


def _independent(wrapped: Any, table: Table, rows: Tensor, count: int, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether one voter, in evaluation mode, answers some rows alone as it does among all."""
    leaves, rebuild = flatten((args, kwargs))
    sources = engine_of(wrapped).clones.sources(leaves)
    before = sources.all()

    def answers(inputs: list[Any]) -> list[Tensor]:
        record = wrapped._workbench
        plan = Plan((), record.rules, Bank(table.get), keep_state=False, state=record.state or ())
        branched, _ = engine_of(wrapped).run(plan, *rebuild(inputs))
        return [leaf for leaf in branched.leaves if is_float(leaf)]

    copies = [duplicate(leaf) if isinstance(leaf, Tensor) or is_object(leaf) else leaf for leaf in leaves]
    some = [
        leaf.index_select(0, rows.to(leaf.device)) if isinstance(leaf, Tensor) and leaf.dim() else leaf
        for leaf in copies
    ]
    with torch.no_grad(), evaluating(wrapped):
        try:
            among = answers(copies)  # what is wrong with the inputs is the model's to say
            try:
                alone = answers(some)
            except Exception:  # it does not take fewer rows
                return False
            if len(among) != len(alone):
                return False
            pairs = list(zip(among, alone, strict=True))
            if not all(whole.dim() and len(whole) == count and len(part) == len(rows) for whole, part in pairs):
                return False
            if all(_alike(whole[rows.to(whole.device)], part) for whole, part in pairs):
                return True
            # a model that draws random numbers in evaluation mode answers otherwise each time, whatever the rows
            return not all(_alike(whole, again) for whole, again in zip(among, answers(copies), strict=True))
        finally:
            sources.restore(before)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.01, atol=0.01 * float(_size(a)), equal_nan=True)


def _size(leaf: Tensor) -> Tensor:
    """The root mean square of what is finite."""
    finite = leaf[leaf.isfinite()]
    return finite.abs().square().mean().sqrt() if finite.numel() else torch.zeros(())
