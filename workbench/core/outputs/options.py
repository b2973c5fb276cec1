"""The option `output=`, the meanings of a model's outputs: parsing, short forms, and conversion to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from .class_scores import Binary, Classes, Logits, Probs
from .meanings import Detections, Mean, Meaning, State, Values

Short = Literal["values", "logits", "probs", "binary", "mean"]
VALUES, MEAN = Values(), Mean()
SHORT: dict[str, Meaning] = {m.short: m for m in (VALUES, Logits(), Probs(), Binary(), MEAN)}
Output = Short | Meaning | Mapping[str | int, Any] | None


def read(output: Any, inside: bool = False) -> Any:
    """Validate an option `output=` and return it as stored: a short form if there is one, else a meaning, or a dict of these by dotted name.

    Args:
        output: the option.
        inside: whether it is a value of a dict.

    Raises:
        ValueError: if it is not a valid option.
    """
    if output is None and not inside:
        return None
    if isinstance(output, str) and output in SHORT:
        return output
    if isinstance(output, type) and issubclass(output, Meaning):
        output = output()
    if isinstance(output, State) and not inside:
        raise ValueError(
            'output=State() leaves nothing to predict; name the output that is state, output={"state": State()}, or use state=1'
        )
    if isinstance(output, Meaning):
        return next((short for short, meaning in SHORT.items() if meaning == output), output)
    if (
        isinstance(output, Mapping)
        and output
        and not inside
        and all(isinstance(key, str | int | tuple) for key in output)
    ):
        return {str(key): read(value, inside=True) for key, value in output.items()}
    raise ValueError(
        f'output must be "values", "logits", "probs" or "binary", a meaning of workbench.outputs such as Logits(dim=1), or a dict from the '
        f"name, index or dotted path of an output to one of these, not {output!r}"
    )


def meaning_of(output: Any) -> Any:
    """Return the meaning that a stored option, or a value of its dict, stands for."""
    return SHORT[output] if isinstance(output, str) else output


def form_of(output: Any) -> str:
    """Return the name of the output's single meaning ("values", "logits", "probs", "binary", "detections", ...); "several" for a dict."""
    return "several" if isinstance(output, Mapping) else "values" if output is None else meaning_of(output).short


def has_classes(output: Any) -> bool:
    """Return whether any output holds scores of classes or boxes, whose risks are entropies."""
    entries = output.values() if isinstance(output, Mapping) else (output,)
    return any(isinstance(entry if entry is None else meaning_of(entry), Classes | Detections) for entry in entries)


def has_detections(output: Any) -> bool:
    """Return whether any output holds detections."""
    if output is None or type(output) is str:  # fast path, since this runs several times per call
        return False
    entries = output.values() if isinstance(output, Mapping) else (output,)
    return any(isinstance(entry, Detections) for entry in entries)


def states_of(output: Any) -> tuple[str, ...]:
    """Return the names of the outputs that are state."""
    if not isinstance(output, Mapping):
        return ()
    return tuple(name for name, entry in output.items() if isinstance(meaning_of(entry), State))


def to_json(output: Any) -> Any:
    """Convert the option to JSON values: {"is": name, option: value} for a meaning without a short form."""
    if isinstance(output, Mapping):
        return {"outputs": {name: to_json(entry) for name, entry in output.items()}}
    if isinstance(output, Meaning):
        return {"is": type(output).__name__, **{field.name: getattr(output, field.name) for field in fields(output)}}
    return output


def from_json(text: Any) -> Any:
    """Convert JSON values from `to_json` back to the option.

    Raises:
        ValueError: if they are not a valid option.
    """
    if isinstance(text, dict) and "outputs" in text:
        return read({name: from_json(entry) for name, entry in text["outputs"].items()})
    if isinstance(text, dict):
        options = {name: value for name, value in text.items() if name != "is"}
        cls = next(
            (cls for cls in (Logits, Probs, Binary, Detections, Values, Mean, State) if cls.__name__ == text.get("is")),
            None,
        )
        if cls is None:
            raise ValueError(f"output: {text!r} is not a meaning of workbench.outputs")
        return read(cls(**options))
    return read(text)
