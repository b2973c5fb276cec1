"""Refusal of models sharded by `fully_shard`, of whose parameters each process holds a part."""

from __future__ import annotations

from torch import nn

WHOLE = (
    "this needs whole parameters: do it before fully_shard, or load the whole state into a wrapped model that is not sharded, "
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))"
)


def refuse_sharded(model: nn.Module, what: str) -> None:
    """Raise TypeError if a model is sharded; the message ends with what to do."""
    name = next((name for name, p in nn.Module.named_parameters(model) if type(p).__name__ == "DTensor"), None)
    if name is not None:
        raise TypeError(f"{type(model).__name__} is sharded ({name} is a DTensor), and {what}")


__all__ = ["WHOLE", "refuse_sharded"]
