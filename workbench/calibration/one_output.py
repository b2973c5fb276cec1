"""Selection of the output to calibrate in models that return a structure, such as those of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from workbench.core.outputs.meanings import Meaning
from workbench.core.outputs.options import form_of
from workbench.core.outputs.resolution import resolve
from workbench.engine.tree import flatten, names, replace_node

FORMS, BINARY = ("values", "logits", "probs"), "binary"
REMEDY = 'output={"logits": Logits()}, or wrap a function that returns it'


def one_meaning(output: Any) -> Any:
    """Return the meaning of the output to calibrate: the option `output=`, or the only entry of a dict that is values or class scores.

    A yes or no counts if there is nothing else.

    Raises:
        ValueError: there is no such output, or several.
    """
    entries = list(output.values()) if isinstance(output, Mapping) else [output]
    chosen = _calibrated([form_of(entry) for entry in entries])
    if len(chosen) == 1:
        return entries[chosen[0]]
    raise ValueError(
        f"the model was wrapped with output={output!r}; this needs exactly one output that is values [n, ...] or class scores: "
        f"name only that one, {REMEDY}"
    )


def _calibrated(forms: Sequence[str]) -> list[int]:
    """Return the positions of the outputs that can be calibrated."""
    return [i for i, form in enumerate(forms) if form in FORMS] or [i for i, form in enumerate(forms) if form == BINARY]


def one_name(output: Any, y: Any) -> str:
    """Return the dotted name of this output in what a model returns; "" for a tensor.

    Args:
        output: the wrapper's output option.
        y: output of the model.

    Raises:
        TypeError: y does not contain exactly one such tensor.
    """
    if isinstance(y, Tensor):
        return ""
    leaves, paths = flatten(y)[0], names(y)
    meanings: list[Meaning | None] = resolve(output, lambda: paths, leaves, 0)
    places = _calibrated(["" if meaning is None else form_of(meaning) for meaning in meanings])
    if len(places) == 1:
        return paths[places[0]]
    example = repr(paths[places[0] if places else 0]) if paths else "'logits'"
    several = ", ".join(repr(paths[i]) for i in places) or "none"
    raise TypeError(
        f"the model gives a {type(y).__name__}; this needs exactly one tensor of predictions [rows, ...], and found: {several}. "
        f"Name it when wrapping, such as output={{{example}: 'values'}} or output={{{example}: Logits()}}, or wrap a function that returns it"
    )


def pick(tree: Any, name: str) -> Any:
    """Return the entry of a tree with a dotted name; a tensor, such as the risk of whole rows, is returned itself."""
    if not name or isinstance(tree, Tensor):
        return tree
    return dict(zip(names(tree), flatten(tree)[0], strict=True))[name]


def put(tree: Any, name: str, value: Any) -> Any:
    """Return the tree with the entry of a dotted name replaced; the value itself if the tree is a tensor or None."""
    return value if tree is None or isinstance(tree, Tensor) else replace_node(tree, name, lambda _: value)


__all__ = ["FORMS", "one_meaning", "one_name", "pick", "put"]
