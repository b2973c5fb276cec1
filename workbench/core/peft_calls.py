"""What peft is about to do to a wrapped model: refused by name, before anything is changed, where voters or risk heads cannot follow.

peft offers no hook before it changes a model. All its entry points first walk through the modules, so a wrapped model looks there at who asks.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn

from ..engine.clone import structural_copy
from .additions import MARK
from .calls.frozen import refuse_change
from .crossfit import members_axis
from .ownership import table_of
from .runtime import plain_clone, restore
from .saving.extraction import extract
from .saving.savepoint import Savepoint

# adapters that only add layers next to the base, and with which merging, saving and loading do for each voter what they do for a plain model
_KINDS = ("LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "FOURIERFT")
# initializations that leave the base as it is, and depend on no data
_DRAWN = (True, False, "gaussian", "orthogonal", "lycoris")
# options that do more than add layers next to the base, with the value that switches them off
_PLAIN = {
    "bias": "none",
    "target_parameters": None,
    "trainable_token_indices": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
}


def look_who_walks(wrapped: Any, prefix: str) -> None:
    """Check what peft is about to do, if it is peft that walks through the modules of a wrapped object.

    Args:
        wrapped: the wrapped object.
        prefix: its dotted path in the model that peft changes; "" if that is the object itself.

    Raises:
        TypeError: if peft is about to do what voters or risk heads cannot follow; nothing is changed.
    """
    if torch.compiler.is_compiling() or "peft" not in sys.modules or "_workbench" not in wrapped.__dict__:
        return
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__") == "torch.nn.modules.module" or frame.f_code.co_name.startswith("<")
    ):
        frame = frame.f_back
    check = _CHECKS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
    if check is not None:
        check(wrapped, prefix, frame.f_locals)


def _injected(wrapped: Any, prefix: str, call: Mapping[str, Any]) -> None:
    """`inject_adapter` of a tuner."""
    record, config = wrapped._workbench, call["self"].peft_config[call["adapter_name"]]
    refuse_change(wrapped, "adding layers of peft")
    if getattr(config, "target_parameters", None) and call["model"] is wrapped:
        refuse(wrapped, f"target_parameters={config.target_parameters!r}, which each call sets anew")
    if not record.rules:  # all branches share the layers
        return
    if call["model"] is not wrapped:
        _refuse_part(wrapped, prefix, config, call["self"]._check_target_module_exists)
        return
    if not members_axis(record.methods):
        refuse(wrapped, f"{', '.join(map(repr, record.methods))} depends on the layers that it was applied to")
    for method in record.methods:
        if not method.movable:
            refuse(wrapped, f"{method!r} depends on the layers that it was applied to")
    if record.method != "forward":
        refuse(wrapped, f"it answers with risk in {record.method}()")
    if record.tails and not record.ordered:
        refuse(wrapped, "no call has shown yet whether the layers that vote are the last ones (call it once before)")
    bases = {base.__module__ for module in wrapped.modules() for base in type(module).__mro__}
    if len(call["self"].peft_config) > 1 or any(name.startswith("peft.") for name in bases):
        refuse(wrapped, f"it has adapters already ({', '.join(map(repr, call['self'].peft_config))})")
    _check_config(wrapped, call["adapter_name"], config)
    wrapped.__dict__["_engine"].injection = Injection(wrapped, call["self"], call["adapter_name"], config)


class Injection:
    """What peft is about to put into a wrapped model, and the model before.

    Args:
        wrapped: the wrapped model.
        tuner: the module of peft that does it.
        name: name of the adapter.
        config: its configuration.
    """

    def __init__(self, wrapped: Any, tuner: Any, name: str, config: Any) -> None:
        self.savepoint = Savepoint(wrapped, values=False)
        table = table_of(wrapped)
        self._before: Any = restore(structural_copy(wrapped), table.originals, table.views)
        self._tuner, self._configs = type(tuner), {name: copy.deepcopy(config)}

    def into(self, index: Mapping[str, int]) -> nn.Module:
        """Return a plain model of one branch, into which peft has put the same."""
        model = extract(plain_clone(self._before)[0], table_of(self._before), dict(index), False)
        (name,) = self._configs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft has warned already
            self._tuner(model, copy.deepcopy(self._configs), name)
        return model


def _check_config(wrapped: Any, name: str, config: Any) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind not in _KINDS:
        refuse(wrapped, f"adapter {name!r} is of type {kind}, not {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
    for option, plain in _PLAIN.items():
        value = getattr(config, option, plain)
        if value and value != plain:
            refuse(wrapped, f"adapter {name!r} has {option}={value!r}")
    for option in ("init_weights", f"init_{kind.lower()}_weights"):
        value = getattr(config, option, True)
        if not any(value is drawn or value == drawn for drawn in _DRAWN):
            refuse(wrapped, f"adapter {name!r} has {option}={value!r}, which changes the base, or depends on data")


def _refuse_part(wrapped: Any, prefix: str, config: Any, matches: Callable[[Any, str], Any]) -> None:
    """Refuse adapters inside a part that is wrapped with `at=`; those around it are right."""
    saved, parameters = (tuple(getattr(config, name, None) or ()) for name in ("modules_to_save", "target_parameters"))
    linear = str(config.target_modules).lower() == "all-linear"
    for path, module in nn.Module.named_modules(wrapped, prefix=prefix):
        if MARK in path:
            continue
        inside = path != prefix and path.endswith(saved) if saved else False
        names = [f"{path}.{name}" for name in (*module._parameters, *module._buffers)]
        inside = inside or any(name.partition(MARK)[0].endswith(parameters) for name in names if parameters)
        if inside or (isinstance(module, nn.Linear) if linear else matches(config, path)):
            model = type(wrapped)._plain_class.__name__
            raise TypeError(
                f"peft would put adapters into {path!r}, inside the part {prefix!r} ({model}) that is wrapped with at={prefix!r}, and all its "
                "branches would share them. Add them to the plain model, and wrap the part of that: "
                f"wrapper(peft.get_peft_model(model, config), at='base_model.model.{prefix}')"
            )


def _prompted(wrapped: Any, prefix: str, call: Mapping[str, Any]) -> None:
    """`_setup_prompt_encoder` of a model of peft."""
    if call["self"].base_model is wrapped and wrapped._workbench.rules:
        kind = getattr(call["config"].peft_type, "value", call["config"].peft_type)
        refuse(wrapped, f"adapter {call['adapter_name']!r} is of type {kind}, a prompt outside of the model")


def _adapted(wrapped: Any, prefix: str, call: Mapping[str, Any]) -> None:
    """`add_adapter` of adaption prompts, which replace the attention."""
    target = f".{call['config'].target_modules}"
    if call["self"].model is wrapped or any(
        path.endswith(target) for path, _ in nn.Module.named_modules(wrapped, prefix=prefix)
    ):
        refuse(wrapped, f"adapter {call['adapter_name']!r} is of type ADAPTION_PROMPT")


def _loaded(wrapped: Any, prefix: str, call: Mapping[str, Any]) -> None:
    """`set_peft_model_state_dict`, which `load_adapter` and `from_pretrained` call."""
    names = [name.partition(MARK) for name, _ in nn.Module.named_parameters(wrapped)]
    voters = any(mark and call["adapter_name"] in name.split(".") for name, mark, _ in names)
    if voters and not any(MARK in key for key in call["peft_model_state_dict"]):
        error = TypeError(
            f"these are the adapters of one plain model, and each voter of this wrapped {type(wrapped)._plain_class.__name__} has its own. Load "
            "them into the plain model and wrap that, vote.Wrapper(finetune=True)(peft.PeftModel.from_pretrained(model, folder, "
            "is_trainable=True)): all voters then start at them, on a shared base. For voters with their own base, load them into each of "
            "wrapped.voters()"
        )
        if within_from_pretrained():
            undo(wrapped, error)
        raise error
    wrapped.__dict__["_engine"].injection = None


_CHECKS: dict[tuple[str, str], Callable[[Any, str, Mapping[str, Any]], None]] = {
    ("peft.tuners.tuners_utils", "inject_adapter"): _injected,
    ("peft.peft_model", "_setup_prompt_encoder"): _prompted,
    ("peft.tuners.adaption_prompt.model", "add_adapter"): _adapted,
    ("peft.utils.save_and_load", "set_peft_model_state_dict"): _loaded,
}


def within_from_pretrained() -> bool:
    """Return whether `PeftModel.from_pretrained` is running, which adds layers and then loads them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("peft.peft_model", "from_pretrained"):
            return True
        frame = frame.f_back
    return False


def undo(wrapped: Any, error: TypeError) -> None:
    """Take out what peft has put in since `inject_adapter` began."""
    injection = wrapped.__dict__["_engine"].injection
    if injection is not None:
        injection.savepoint.restore(error)
        table_of(wrapped).show()


def refuse(wrapped: Any, what: str) -> NoReturn:
    """Raise the error that layers of peft cannot be added."""
    raise TypeError(
        f"peft cannot add its layers to this wrapped {type(wrapped)._plain_class.__name__}, since its branches can't each have their "
        f"own: {what}. Add them to the plain model and wrap that, wrapper(peft.get_peft_model(model, config)); voters then share the frozen "
        "base. For voters with their own base, add them to each of wrapped.voters()"
    )


__all__ = ["look_who_walks", "refuse", "undo", "within_from_pretrained"]
