"""What `generate` of transformers encodes before its first step: every branch of a wrapped object encodes it itself."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...engine.state import BranchedState
from ..method import Call
from ..ownership import extra
from .predict import plan_of, run
from .risks import reduced

ENCODED = "encoder_last_hidden_state"
_PREPARING = ("_prepare_text_encoder_decoder_kwargs_for_generation", "_prepare_encoder_decoder_kwargs_for_generation")
_IMAGES = "_supports_mm_encoder_outputs"  # whether they are encoded beforehand; else forward does it, at the first step
_OF_DECODER = ("decoder_", "cross_attn", "use_cache", "cache", "past_key_values", "encoder_outputs", "labels")


def encoders_of(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods of a class of transformers by which `generate` calls its encoders alone, for its wrapped objects; none for other classes."""
    methods = {name: _preparing(getattr(cls, name)) for name in _PREPARING if hasattr(cls, name)}
    if hasattr(cls, _IMAGES):
        methods[_IMAGES] = _within_forward(getattr(cls, _IMAGES))
    return methods


def _preparing(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def method(
        self: Any, inputs_tensor: Tensor, model_kwargs: dict[str, Any], model_input_name: Any, generation_config: Any
    ) -> Any:
        if not _answers(self):
            return prepare(self, inputs_tensor, model_kwargs, model_input_name, generation_config)
        return {
            **model_kwargs,
            "encoder_outputs": _encoded(self, inputs_tensor, model_kwargs, model_input_name, generation_config),
        }

    return method


def _within_forward(supports: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(supports)
    def method(self: Any) -> bool:
        return not _answers(self) and supports(self)

    return method


def _answers(model: Any) -> bool:
    """Whether a wrapped object, not one of its branches, is asked by its forward."""
    return "_workbench" in model.__dict__ and model._workbench.method == "forward"


def _encoded(
    wrapped: Any, inputs: Tensor, model_kwargs: dict[str, Any], input_name: str | None, generation_config: Any
) -> Any:
    """What each branch's encoder gives, as an output of the encoder that forward takes; the rows as often as there are beams."""
    from transformers.modeling_outputs import BaseModelOutput

    known = inspect.signature(type(wrapped)._plain_class.forward).parameters
    kwargs = {name: v for name, v in model_kwargs.items() if name in known and not name.startswith(_OF_DECODER)}
    kwargs[input_name or wrapped.main_input_name] = inputs
    kwargs["decoder_input_ids"] = torch.zeros(len(inputs), 1, dtype=torch.long, device=inputs.device)
    asked = {name: True for name in ("output_attentions", "output_hidden_states") if getattr(generation_config, name)}
    if (scaling := extra(wrapped, "scaling")) is not None:
        _, kwargs = scaling.inputs((), kwargs)
    plan = dataclasses.replace(plan_of(wrapped, Call(wrapped.training, False)), state=((ENCODED,),))
    branched, _ = run(wrapped, plan, (), {**kwargs, **asked, "use_cache": False, "return_dict": True})
    y, _ = reduced(wrapped, branched, False, None)
    state = y.get(ENCODED)
    if not isinstance(state, BranchedState):
        raise TypeError(
            f"generate of a wrapped {type(wrapped).__name__} needs what each voter's encoder gives, and forward returns no {ENCODED}, only "
            f"{', '.join(y)}: generate with each of wrapped.voters(), or wrap a model that returns it"
        )
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    if copies > 1:  # transformers repeats tensors alone
        state = state.map(lambda hidden: hidden.repeat_interleave(copies, 0))
    encoded: dict[str, Any] = {
        "last_hidden_state": state,
        "hidden_states": y.get("encoder_hidden_states"),
        "attentions": y.get("encoder_attentions"),
    }
    return BaseModelOutput(**encoded)


__all__ = ["encoders_of"]
