"""Adapters of peft in wrapped models: methods that would work on the first branch's adapters alone are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MERGED = (
    "the adapters of the first branch only, into weights that all share. Merge those of each voter, "
    "[voter.merge_and_unload() for voter in wrapped.voters()], or of the plain model before wrapping it"
)
_TAKEN = "an adapter of the first branch only. Do that to the plain model (wrapped.unwrap()), and wrap it again"
_ADDED = "one set of adapters, which all branches would share. Do that to the plain model (wrapped.unwrap()), and wrap it again"
_REFUSED = {
    "merge_adapter": f"would merge {_MERGED}",
    "merge_and_unload": f"would merge {_MERGED}",
    "unload": f"would take away {_TAKEN}",
    "delete_adapter": f"would take away {_TAKEN}",
    "add_adapter": f"would add {_ADDED}",
    "add_weighted_adapter": f"would add {_ADDED}",
    "generate": "would ask the first branch only, since peft gives the call to the model inside. Wrap that one: "
    "wrapper(model.get_base_model()) holds the adapters as well",
}


def refusals_of(cls: type) -> dict[str, Callable[..., Any]]:
    """Methods of a class of peft that its wrapped objects refuse, by name; none for other classes."""
    if not any(base.__module__.partition(".")[0] == "peft" for base in cls.__mro__):
        return {}
    return {name: _refusing(cls, name, words) for name, words in _REFUSED.items()}


def _refusing(cls: Any, name: str, words: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_workbench" in self.__dict__:
            raise TypeError(f"{name} of this wrapped {cls.__name__} {words}")
        inherited = getattr(cls, name, None)  # most are looked up in the model inside
        return inherited(self, *args, **kwargs) if inherited else cls.__getattr__(self, name)(*args, **kwargs)

    method.__name__ = name
    return method


__all__ = ["refusals_of"]
