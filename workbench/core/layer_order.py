"""The order in which layers run: traced with an example, or checked at the first call."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..engine.effects.random import values_unavailable
from ..engine.execution import Execution, Watch
from ..engine.plan import Bank, Plan
from ..errors import WorkbenchWarning
from ..introspect.source_lines import user_stacklevel
from .outputs.options import has_detections
from .ownership import engine_of, table_of


def watched(wrapped: Any, args: tuple, kwargs: dict[str, Any], output: Any = None) -> Execution | None:
    """Trace the order of layers in one pass of the first branch.

    Args:
        wrapped: the wrapped object.
        args, kwargs: inputs of the model.
        output: meaning of the outputs from a wrapper that is not attached yet; None for that of the record.

    Returns:
        The traced execution; None if the pass fails.
    """
    record, table = wrapped._workbench, table_of(wrapped)
    owners = {
        f"{path}.{attribute}" if path else attribute: slot.owners[0][0]
        for slot in record.slots.values()
        for path, attribute in slot.owners
        if not slot.buffer
    }
    watch = Watch(owners, contractions=table.has_matrices(), choices=not has_detections(output or record.output))
    try:
        engine_of(wrapped).look(Plan((), record.rules, Bank(table.get), (watch,), keep_state=False), args, kwargs)
    except Exception:  # the user's call of the model raises the error again
        return None
    return watch.execution


def check_tails(wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Check at the first call that the layers assumed to be the last ones, by order of registration, do run last; warn otherwise.

    Raises:
        ValueError: if a main output depends on none of them, so that it would have no risk.
    """
    record = wrapped._workbench
    if not record.tails or record.ordered or torch.compiler.is_compiling() or values_unavailable():
        return
    execution, layers = watched(wrapped, args, kwargs), table_of(wrapped).layers()
    if execution is None:
        record.ordered = True
        return
    # tied weights, such as those of a language model's head and embedding, belong to the trunk
    tied = {slot.owners[0][0] for slot in record.slots.values() if len({path for path, _ in slot.owners}) > 1}
    for argument, n in record.tails.items():
        chosen = [path or "its own" for path in layers[-n:]]
        for name, output in zip(execution.names, execution.outputs, strict=True):
            ran = [path or "its own" for path in output if path in layers and path not in tied]
            after = next((i for i, path in enumerate(reversed(ran)) if path in chosen), len(ran))
            if not after:  # the last layer is among those chosen; layers between them may be shared
                continue
            problem = (
                f"{argument}={n} took {', '.join(chosen)} for the last layers of {type(wrapped)._plain_class.__name__}, by the order in which "
                f"they are registered, and {name} "
            )
            remedy = "Wrap with example=x, inputs of the model: the last layers of each output are then found by the order in which layers run"
            if after == len(ran):
                raise ValueError(
                    f"{problem}does not depend on them, so that it would have no risk of its own: it ends in {ran[-1]}. {remedy}"
                )
            warnings.warn(
                f"{problem}comes from others after them: {', '.join(ran[-after:])}. {remedy}",
                WorkbenchWarning,
                stacklevel=user_stacklevel(),
            )
    record.ordered = True


__all__ = ["check_tails", "watched"]
