"""Refusal of losses that reach the parameters only through rounding or another step, whose gradient is zero."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# nodes of autograd whose gradient is zero everywhere; Div only with a rounding mode
_FLAT = {
    "Round": "round",
    "Floor": "floor",
    "Ceil": "ceil",
    "Trunc": "trunc",
    "Sign": "sign",
    "Div": "division with rounding_mode",
}


def refuse_flat(loss: Tensor) -> None:
    """Raise ValueError if every path from a loss to the trainable parameters leads through a step, so that all gradients are zero.

    Args:
        loss: the loss of a batch in training mode, with its graph.
    """
    nodes, seen, steps = [loss.grad_fn], set[Any](), set[str]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # a leaf: a parameter, or an input with gradients
            return
        name = node.name().split("Backward")[0]
        if name in _FLAT and (name != "Div" or getattr(node, "_saved_rounding_mode", None)):
            steps.add(_FLAT[name])
            continue
        nodes += [parent for parent, _ in node.next_functions]
    if steps:
        raise ValueError(
            f"the loss depends on the parameters only through {' and '.join(sorted(steps))}, whose gradient is zero, so that nothing would be "
            "trained: return the numbers before that and do it outside the wrapped model, or let gradients pass, z + (z.round() - z).detach()"
        )


__all__ = ["refuse_flat"]
