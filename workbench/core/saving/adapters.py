"""Adapters of peft in folders of wrapped models: those of the first branch, which peft and the Trainer find, and the loading of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

WHOLE = "workbench.safetensors"  # of a folder that the plain class does not read
ADAPTERS = "adapter_model.safetensors"  # a name of peft


def has_readable_adapters(wrapped: Any) -> bool:
    """Whether the adapters of the first branch alone are a model of peft: there is one set of them, and no units or priors."""
    return len(wrapped.peft_config) == 1 and "_workbench" not in type(wrapped).unwrap(wrapped).__dict__


def write_adapters(wrapped: Any, folder: Path) -> None:
    """Write the adapters of the first branch as peft reads them."""
    import peft
    from safetensors.torch import save_file

    (name,) = wrapped.peft_config
    tensors = peft.get_peft_model_state_dict(type(wrapped).unwrap(wrapped), adapter_name=name)
    save_file(
        {key: value.detach().clone().contiguous() for key, value in tensors.items()},
        folder / ADAPTERS,
        {"format": "pt"},
    )


def loading_adapters(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load_adapter` for the wrapped objects of a class of peft, by which the Trainer goes on from a checkpoint: that of every branch.

    Args:
        load: the class's own.
    """

    @functools.wraps(load)
    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        if "_workbench" not in self.__dict__:
            return load(self, model_id, adapter_name, *args, **kwargs)
        whole = Path(model_id) / WHOLE
        if whole.is_file() and [*self.peft_config] == [adapter_name]:
            from safetensors.torch import load_file

            return _load_beside_four_bits(self, load_file(whole))
        if self._workbench.released:
            raise TypeError(
                f"load_adapter of this wrapped {type(self).__name__} would load one set of adapters, of which each branch has its own, from "
                f"{model_id}: load them into the plain model and wrap that with finetune=True, or give a folder that save_pretrained of such a "
                "wrapped model has written, and the name of its only adapters"
            )
        return load(self, model_id, adapter_name, *args, **kwargs)

    return load_adapter


def _load_beside_four_bits(wrapped: Any, state: dict[str, Tensor]) -> Any:
    """Load a state, but what the layers of bitsandbytes in four bits do not take of their own: they stay, frozen as they are."""
    left_out = tuple(name for name, p in wrapped.named_parameters() if getattr(p, "quant_state", None) is not None)
    kept = {name: tensor for name, tensor in state.items() if not name.startswith(left_out)}
    if not left_out or kept.keys() != {name for name in wrapped.state_dict() if not name.startswith(left_out)}:
        return wrapped.load_state_dict(state)
    return wrapped.load_state_dict(kept, strict=False)


__all__ = ["WHOLE", "has_readable_adapters", "loading_adapters", "write_adapters"]
