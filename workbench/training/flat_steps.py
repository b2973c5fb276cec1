"""Refusal of losses that reach the parameters only through rounding or another step, whose gradient is zero."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.engine.dependence import nodes_behind

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
    leaves, nodes = nodes_behind([loss], lambda node: _step_of(node) is not None)
    steps = {step for step in map(_step_of, nodes) if step is not None}
    if steps and not leaves:
        raise ValueError(
            f"the loss depends on the parameters only through {' and '.join(sorted(steps))}, whose gradient is zero, so that nothing would be "
            "trained: return the numbers before that and do it outside the wrapped model, or let gradients pass, z + (z.round() - z).detach()"
        )


def _step_of(node: Any) -> str | None:
    """Return which step a node of autograd is, None if it is none."""
    name = node.name().split("Backward")[0]
    return _FLAT.get(name) if name != "Div" or getattr(node, "_saved_rounding_mode", None) else None


__all__ = ["refuse_flat"]
