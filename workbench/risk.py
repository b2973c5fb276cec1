"""The named risks of a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch.utils._pytree import register_pytree_node

from .engine.tree import tree_map


@dataclass
class Risk:
    """The risks of one prediction, by cause; what no method measured is None.

    Standard deviations in the units of the prediction and of its shape, except for `vacuitic`, one standardised number a row, and for class
    outputs, where all are entropies in nats, one number a row. `total**2 == aleatoric**2 + epistemic**2` (law of total variance); for class
    outputs `total == aleatoric + epistemic`.

    Args:
        aleatoric: what the model cannot understand: noise in the data.
        epistemic: what it does not know well: little data here.
        vacuitic: what it has never seen: input unlike the training data.
        total: aleatoric and epistemic together.
    """

    aleatoric: Any = None
    epistemic: Any = None
    vacuitic: Any = None
    total: Any = None

    def names(self) -> tuple[str, ...]:
        """The risks that are there."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def map(self, function: Callable[[Any], Any]) -> Risk:
        """Apply a function to every tensor of every risk, such as `lambda t: t.detach().cpu()`."""
        return Risk(
            **{
                name: tree_map(lambda leaf: leaf if leaf is None else function(leaf), getattr(self, name))
                for name in self.names()
            }
        )

    def __getitem__(self, name: str) -> Any:
        if name not in (known := [field.name for field in fields(self)]):
            raise KeyError(f"{name!r} is no risk; there are {', '.join(known)}")
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __repr__(self) -> str:
        def brief(value: Any) -> str:
            shape = getattr(value, "shape", None)
            return f"{type(value).__name__}{tuple(shape)}" if shape is not None else type(value).__name__

        return f"Risk({', '.join(f'{name}={brief(getattr(self, name))}' for name in self.names())})"


# so that torch.vmap and torch.export take it for a tree of tensors
register_pytree_node(
    Risk,
    lambda risk: ([risk[name] for name in risk], list(risk)),
    lambda values, names: Risk(**dict(zip(names, values, strict=True))),
    serialized_type_name="workbench.Risk",
)
