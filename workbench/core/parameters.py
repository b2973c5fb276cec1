"""Iterators over the parameters of a wrapped object, which still answer to the calls of the dicts that they were."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from torch import nn

from ..deprecation import warn_deprecated


class ParameterIterator(Iterator[nn.Parameter]):
    """Parameters one by one, as `nn.Module.parameters` gives them.

    Args:
        method: what gives it, "risk_parameters" or "base_parameters".
        named: names and parameters.
    """

    def __init__(self, method: str, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._method, self.named = method, dict(named)
        self._left = iter(self.named.values())

    def __next__(self) -> nn.Parameter:
        return next(self._left)

    def _dict(self) -> dict[str, nn.Parameter]:
        warn_deprecated(
            f"{self._method}() as a dict",
            f"dict(wrapped.named_{self._method}()) for names and parameters",
            stacklevel=3,
        )
        return self.named

    def items(self) -> ItemsView[str, nn.Parameter]:
        """Deprecated: those of the dict of parameters by name."""
        return self._dict().items()

    def keys(self) -> KeysView[str]:
        """Deprecated: those of the dict of parameters by name."""
        return self._dict().keys()

    def values(self) -> ValuesView[nn.Parameter]:
        """Deprecated: those of the dict of parameters by name."""
        return self._dict().values()

    def get(self, name: str, default: Any = None) -> Any:
        """Deprecated: that of the dict of parameters by name."""
        return self._dict().get(name, default)

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._dict()[name]

    def __contains__(self, item: object) -> bool:
        return item in self._dict() if isinstance(item, str) else any(parameter is item for parameter in self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return dict, (self._dict(),)


__all__ = ["ParameterIterator"]
