"""Inputs that `generate` of transformers encodes before its first step: each branch of a wrapped object encodes them itself."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...engine.state import BranchedState
from ..additions import extra
from ..method import Call
from .predict import plan_of, run
from .risks import reduced

ENCODED = "encoder_last_hidden_state"
_PREPARING = ("_prepare_text_encoder_decoder_kwargs_for_generation", "_prepare_encoder_decoder_kwargs_for_generation")
_IMAGES = "_supports_mm_encoder_outputs"  # whether images are encoded beforehand; otherwise forward encodes them in the first step
_DECODER_ARGUMENTS = ("decoder_", "cross_attn", "use_cache", "cache", "past_key_values", "encoder_outputs", "labels")


def encoders_of(cls: type) -> dict[str, Callable[..., Any]]:
    """Return replacements for the methods of a transformers class by which `generate` calls its encoders alone; none for other classes."""
    methods = {name: _preparing(getattr(cls, name)) for name in _PREPARING if hasattr(cls, name)}
    if hasattr(cls, _IMAGES):
        methods[_IMAGES] = _within_forward(getattr(cls, _IMAGES))
    return methods


def _preparing(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def method(
        self: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any], model_input_name: Any, generation_config: Any
    ) -> Any:
        if not _wraps_forward(self):
            return prepare(self, inputs_tensor, model_kwargs, model_input_name, generation_config)
        return {
            **model_kwargs,
            "encoder_outputs": _encoded(self, inputs_tensor, model_kwargs, model_input_name, generation_config),
        }

    return method


def _within_forward(supports: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(supports)
    def method(self: Any) -> bool:
        return not _wraps_forward(self) and supports(self)

    return method


def _wraps_forward(model: Any) -> bool:
    """Return whether a model is a wrapped object, not one of its branches, and wraps `forward`."""
    return "_workbench" in model.__dict__ and model._workbench.method == "forward"


def _encoded(
    wrapped: Any, inputs: Tensor, model_kwargs: dict[str, Any], input_name: str | None, generation_config: Any
) -> Any:
    """Return the encoder output of all branches in the form that forward takes, with rows repeated for the beams."""
    from transformers.modeling_outputs import BaseModelOutput

    known = inspect.signature(type(wrapped)._plain_class.forward).parameters
    kwargs = {name: v for name, v in model_kwargs.items() if name in known and not name.startswith(_DECODER_ARGUMENTS)}
    kwargs[input_name or wrapped.main_input_name] = inputs
    kwargs["decoder_input_ids"] = torch.zeros(len(inputs), 1, dtype=torch.long, device=inputs.device)
    flags = {name: True for name in ("output_attentions", "output_hidden_states") if getattr(generation_config, name)}
    if (scaling := extra(wrapped, "scaling")) is not None:
        _, kwargs = scaling.inputs((), kwargs)
    plan = dataclasses.replace(plan_of(wrapped, Call(wrapped.training, False)), state=((ENCODED,),))
    branched, _ = run(wrapped, plan, (), {**kwargs, **flags, "use_cache": False, "return_dict": True})
    y, _ = reduced(wrapped, branched, False, None)
    state = y.get(ENCODED)
    if not isinstance(state, BranchedState):
        raise TypeError(
            f"generate of a wrapped {type(wrapped).__name__} needs what each voter's encoder gives, and forward returns no {ENCODED}, only "
            f"{', '.join(y)}: generate with each of wrapped.voters(), or wrap a model that returns it"
        )
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    if copies > 1:  # transformers would repeat tensors only, not the state
        state = state.map(lambda hidden: hidden.repeat_interleave(copies, 0))
    encoded: dict[str, Any] = {
        "last_hidden_state": state,
        "hidden_states": y.get("encoder_hidden_states"),
        "attentions": y.get("encoder_attentions"),
    }
    return BaseModelOutput(**encoded)


__all__ = ["encoders_of"]
