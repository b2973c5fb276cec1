"""Settings of the wrappers and meaning of the outputs in a state: written, read and compared."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..additions import MARK
from ..outputs.options import from_json, to_json

SETTINGS = f"settings{MARK}workbench"  # key in the state_dict: settings of the wrappers as bytes of a JSON text
OUTPUT = f"output{MARK}workbench"  # key in that text: meaning of the outputs, if given


def settings_of(wrapped: Any) -> dict[str, Any]:
    """Return method name -> settings, as saved in a state."""
    return json.loads(json.dumps({method.name: method.settings() for method in wrapped._workbench.methods}))


def described(wrapped: Any) -> Tensor:
    """Return the settings for the state_dict, uint8 [bytes]; a tensor, since only tensors can be loaded with weights_only=True."""
    methods = wrapped._workbench.methods
    notes = {f"{key}{MARK}{method.name}": value for method in methods for key, value in method.notes().items()}
    if wrapped._workbench.output is not None:
        notes[OUTPUT] = to_json(wrapped._workbench.output)
    text = json.dumps({**settings_of(wrapped), **notes}, sort_keys=True)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def stored_settings(state: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings in a state by method ({} if it has none), and the notes of methods by "name@method"."""
    stored = state.get(prefix + SETTINGS)
    if stored is None:
        return {}, {}
    try:
        text = json.loads(bytes(_as_bytes(stored).cpu().tolist()).decode())
        notes = {key: text.pop(key) for key in list(text) if MARK in key}
        if not all(isinstance(settings, dict) for settings in text.values()):
            raise ValueError(f"they are {text!r:.80}")
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{prefix}{SETTINGS} in the state holds no valid wrapper settings ({error}): the state is damaged or was changed; use another copy"
        ) from error
    return text, notes


def _as_bytes(stored: Tensor) -> Tensor:
    """Return the bytes of settings, also from a floating-point average of states with equal settings, such as for target networks."""
    if not stored.is_floating_point():
        return stored
    rounded = stored.round()
    return rounded.to(torch.uint8) if bool((stored - rounded).abs().max() < 0.01) else stored


def check_settings(saved: dict[str, Any], wrapped: Any, strict: bool | None = True) -> None:
    """Raise ValueError if a state was saved with other settings; with strict=False only methods in both are compared."""
    current = settings_of(wrapped)
    differing, unequal = [], saved.keys() ^ current.keys()
    for name in sorted(saved.keys() | current.keys()):
        if name not in unequal:
            # settings that are missing in the state were added to workbench after it was saved
            keys = [
                key for key, value in saved[name].items() if key not in current[name] or current[name][key] != value
            ]
            in_state, in_object = (
                _format_settings({key: settings[name].get(key) for key in keys}) for settings in (saved, current)
            )
            if keys:
                differing.append(f"{name}: the state has {in_state}, this object {in_object}")
        elif strict is not False:
            in_state, in_object = (
                _format_settings(settings[name]) if name in settings else "no such method"
                for settings in (saved, current)
            )
            differing.append(f"{name}: the state has {in_state}, this object {in_object}")
    if saved and differing:
        alternative = (
            ", or load what both have with load_state_dict(state, strict=False) of the wrapped part" if unequal else ""
        )
        raise ValueError(
            f"the state was saved with other wrapper settings; wrap the model alike before loading it{alternative}. {'; '.join(differing)}"
        )


def check_output(notes: dict[str, Any], wrapped: Any) -> None:
    """Raise ValueError if a state was saved with another `output=`; a state without one fits any object."""
    current = wrapped._workbench.output
    if OUTPUT in notes and notes[OUTPUT] != to_json("values" if current is None else current):
        saved = from_json(notes[OUTPUT])
        current_text = "none" if current is None else f"output={current!r}"
        raise ValueError(
            f"the state was saved with output={saved!r}, and this object has {current_text}: predictions and risks would be computed in another "
            f"way. Wrap the model with output={saved!r} before loading it, or, to use the weights with another meaning, load them with "
            "load_state_dict(state, strict=False)"
        )


def _format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in settings.items()) or "no settings"
