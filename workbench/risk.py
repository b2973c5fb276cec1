"""The named risks of a prediction, by cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from torch.utils._pytree import register_pytree_node, tree_leaves

from .engine.tree import tree_map


class _Name(str):
    """Name of a risk, yielded by iteration over a `Risk`; using it like a tensor raises an error that says what to write instead."""

    __slots__ = ()

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(
            f"iterating over a Risk gives names such as {str(self)!r}, which have no {attribute}; {_advice(self)}"
        )


def _advice(name: str) -> str:
    return f"take one risk, such as risk.{name}; as a function of the input: lambda x: wrapped(x, return_risk=True)[1].{name}"


@dataclass
class Risk:
    """The risks of one prediction, by cause; a risk that no method measured is None.

    Risks are standard deviations with the shape and units of the prediction, except `vacuitic`, which is one standardized number per row (or
    per position of a map). For class outputs all risks are entropies in nats, one per row. `total**2 == aleatoric**2 + epistemic**2` (law of
    total variance); for class outputs `total == aleatoric + epistemic`.

    Args:
        aleatoric: irreducible noise in the data.
        epistemic: uncertainty of the model where it has seen little data.
        vacuitic: distance of the input from the training data.
        total: aleatoric and epistemic risk combined.
    """

    aleatoric: Any = None
    epistemic: Any = None
    vacuitic: Any = None
    total: Any = None

    def names(self) -> tuple[str, ...]:
        """Return the names of the risks that are not None."""
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
        if not isinstance(name, str):
            raise TypeError(
                f"a Risk is indexed by name, not by row: {self._advice()}; risk.map(lambda t: t[rows]) takes rows of each"
            )
        if name not in (known := [field.name for field in fields(self)]):
            raise KeyError(f"{name!r} is no risk; there are {', '.join(known)}")
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(map(_Name, self.names()))

    # ---- errors for code that treats a Risk as a single tensor
    def _advice(self) -> str:
        names = self.names()
        return f"it holds {', '.join(names) or 'nothing'}; {_advice('total' if 'total' in names or not names else names[0])}"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"'Risk' object has no attribute {name!r}")
        raise AttributeError(f"a Risk has no {name}: {self._advice()}")

    def _refuse(self, *others: Any, **options: Any) -> NoReturn:
        raise TypeError(f"a Risk is no tensor: {self._advice()}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = (
        _refuse
    )
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __array__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> NoReturn:
        risks = [
            leaf
            for leaf in tree_leaves((args, kwargs), is_leaf=lambda node: isinstance(node, cls))
            if isinstance(leaf, cls)
        ]
        raise TypeError(f"{getattr(function, '__name__', function)} takes tensors, no Risk: {risks[0]._advice()}")

    def __repr__(self) -> str:
        def brief(value: Any) -> str:
            shape = getattr(value, "shape", None)
            return f"{type(value).__name__}{tuple(shape)}" if shape is not None else type(value).__name__

        return f"Risk({', '.join(f'{name}={brief(getattr(self, name))}' for name in self.names())})"


# torch.vmap and torch.export then handle a Risk as a tree of tensors

register_pytree_node(
    Risk,
    lambda risk: ([risk[name] for name in risk.names()], list(risk.names())),
    lambda values, names: Risk(**dict(zip(names, values, strict=True))),
    serialized_type_name="workbench.Risk",
)
