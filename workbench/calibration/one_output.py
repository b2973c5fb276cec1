"""The one output that is calibrated of a model that gives a structure, such as the outputs of transformers: a tensor that has a meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from workbench.core.outputs.meanings import Meaning
from workbench.core.outputs.options import form_of
from workbench.core.outputs.resolution import resolve
from workbench.engine.tree import flatten, names, replace_node

FORMS = ("values", "logits", "probs")


def one_meaning(output: Any) -> Any:
    """What the one output means: all of an option `output=`, or the one entry of a dict that is values or scores of classes.

    Raises:
        ValueError: if there is no such output, or several.
    """
    entries = list(output.values()) if isinstance(output, Mapping) else [output]
    chosen = [entry for entry in entries if form_of(entry) in FORMS]
    if len(chosen) == 1:
        return chosen[0]
    raise ValueError(
        f"the model was wrapped with output={output!r}; this works on one output that is values [n, ...] or scores of classes: name that alone, "
        'output={"logits": Logits()}, or wrap a function that returns it'
    )


def one_name(output: Any, y: Any) -> str:
    """The dotted name of that output in what a model gives, "" of a tensor.

    Args:
        output: the option as it is kept.
        y: what the model gives.

    Raises:
        TypeError: if y does not hold one such tensor.
    """
    if isinstance(y, Tensor):
        return ""
    leaves, paths = flatten(y)[0], names(y)
    meanings: list[Meaning | None] = resolve(output, lambda: paths, leaves, 0)
    places = [i for i, meaning in enumerate(meanings) if meaning is not None and form_of(meaning) in FORMS]
    if len(places) == 1:
        return paths[places[0]]
    several = ", ".join(repr(paths[i]) for i in places) or "none"
    raise TypeError(
        f"the model gives a {type(y).__name__}; calibration needs one tensor of predictions [rows, ...], and of these there are: {several}. Say "
        'which it is when wrapping, output={"logits": Logits()}, or wrap a function that picks it'
    )


def pick(tree: Any, name: str) -> Any:
    """What a tree has at a dotted name; a tensor, such as the risk of whole rows, is that itself."""
    if not name or isinstance(tree, Tensor):
        return tree
    return dict(zip(names(tree), flatten(tree)[0], strict=True))[name]


def put(tree: Any, name: str, value: Any) -> Any:
    """The tree with another value at a dotted name; the value in place of a tensor or of nothing."""
    return value if tree is None or isinstance(tree, Tensor) else replace_node(tree, name, lambda _: value)


__all__ = ["FORMS", "one_meaning", "one_name", "pick", "put"]
