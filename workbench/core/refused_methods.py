"""Refusal of methods of peft and transformers that would only affect the first branch of a wrapped model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MERGED = (
    "only the adapters of the first branch, into weights that all branches share. Merge the adapters of each voter, "
    "[voter.merge_and_unload() for voter in wrapped.voters()], or those of the plain model before wrapping it"
)
_REMOVED = "an adapter of the first branch only. Do that to the plain model (wrapped.unwrap()), and wrap it again"
_ADDED = "one set of adapters, which all branches would share. Do that to the plain model (wrapped.unwrap()), and wrap it again"
_REFUSED = {
    "merge_adapter": f"would merge {_MERGED}",
    "merge_and_unload": f"would merge {_MERGED}",
    "unload": f"would remove {_REMOVED}",
    "delete_adapter": f"would remove {_REMOVED}",
    "add_adapter": f"would add {_ADDED}",
    "add_weighted_adapter": f"would add {_ADDED}",
    "generate": "would use the first branch only, since peft passes the call on to the inner model. Wrap the inner model instead: "
    "wrapper(model.get_base_model()) includes the adapters",
}


def refusals_of(cls: Any) -> dict[str, Callable[..., Any]]:
    """Return name -> refusing method for the methods of a peft or transformers class that its wrapped objects refuse; {} for other classes."""
    name = "resize_token_embeddings"
    methods = {name: _resizing(getattr(cls, name))} if hasattr(cls, name) else {}
    if any(base.__module__.partition(".")[0] == "peft" for base in cls.__mro__):
        methods.update((name, _refusing(cls, name, reason)) for name, reason in _REFUSED.items())
    return methods


def _resizing(resize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resize)
    def resize_token_embeddings(self: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if "_workbench" not in self.__dict__ or not self._workbench.released:
            return resize(self, new_num_tokens, *args, **kwargs)
        embeddings = self.get_input_embeddings()
        if new_num_tokens not in (None, len(embeddings.weight)) or args or kwargs:
            raise TypeError(
                f"resize_token_embeddings of this wrapped {type(self).__name__} would change the {len(embeddings.weight)} embeddings of the "
                f"first branch only. Resize those of the plain model, model.resize_token_embeddings({new_num_tokens}), before you wrap it"
            )
        return embeddings

    return resize_token_embeddings


def _refusing(cls: Any, name: str, reason: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_workbench" in self.__dict__:
            raise TypeError(f"{name} of this wrapped {cls.__name__} {reason}")
        inherited = getattr(cls, name, None)  # most methods are found in the inner model, by __getattr__
        return inherited(self, *args, **kwargs) if inherited else cls.__getattr__(self, name)(*args, **kwargs)

    method.__name__ = name
    return method


__all__ = ["refusals_of"]
