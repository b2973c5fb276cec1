"""Assignment of meanings and of targets to the outputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...engine.effects.random import values_unavailable
from ...engine.tree import children, flatten, is_float
from ...engine.tree import names as tree_names
from .class_scores import Classes, Logits
from .meanings import Detections, Mean, Meaning, State, Values
from .options import MEAN, SHORT, VALUES, has_detections, meaning_of


def detections_at(output: Any, names: Sequence[str]) -> dict[int, Detections]:
    """Return position -> `Detections` for the leaves, given by dotted names, that belong to detections."""
    if isinstance(output, Detections):
        return dict.fromkeys(range(len(names)), output)
    keys = {i: _key_of(name, output) for i, name in enumerate(names)}
    return {i: output[key] for i, key in keys.items() if key is not None and isinstance(output[key], Detections)}


def resolve(output: Any, names: Callable[[], list[str]], leaves: Sequence[Any], depth: int) -> list[Meaning | None]:
    """Return the meaning of each leaf of an output; None for leaves that are not floating-point tensors.

    Args:
        output: the option as returned by `read`.
        names: function that returns the dotted names of the leaves; [""] if the output is a single leaf.
        leaves: leaves of the output; tensors have `depth` leading dimensions of branches.
        depth: number of leading dimensions.

    Raises:
        ValueError: if meanings are ambiguous or do not match the output; the message shows what to write.
    """
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    meanings: list[Meaning | None] = [None] * len(leaves)
    for i in floats:
        meanings[i] = MEAN
    if isinstance(output, Mapping):
        _by_name(output, names(), leaves, floats, depth, meanings)
    if has_detections(output):
        for i, detections in detections_at(output, names()).items():
            # scalars are losses, not detections
            sized = not isinstance(leaves[i], Tensor) or leaves[i].dim() > depth
            meanings[i] = detections if sized else MEAN if is_float(leaves[i]) else None
        return meanings
    if isinstance(output, Mapping):
        return meanings
    meaning = VALUES if output is None else meaning_of(output)
    sized = [i for i in floats if leaves[i].dim() > depth] if len(floats) > 1 else floats
    if isinstance(meaning, Classes) and len(sized) > 1:
        sized = _named(meaning, names(), leaves, sized, depth)
    for i in sized or floats:
        meanings[i] = _checked(meaning, leaves[i], depth, names() if len(leaves) > 1 else [""], i)
    return meanings


def _named(meaning: Classes, names: list[str], leaves: Sequence[Any], sized: list[int], depth: int) -> list[int]:
    """Return the position of the only output named like the meaning, such as "logits", in a list."""
    chosen = [i for i in sized if names[i].rpartition(".")[2] == meaning.short]
    if len(chosen) == 1:
        return chosen
    lines = [f"    {quoted(names[i])}: ...,  # {list(leaves[i].shape[depth:])}" for i in sized]
    raise ValueError(
        f'output="{meaning.short}": the model gives {len(sized)} outputs, and any of them could hold the scores. Write\n'
        f"    output={{{quoted(names[sized[0]])}: {in_code(meaning)}}}\n"
        "if it is that one (the others are averaged, without a risk), or add others of\n" + "\n".join(lines)
    )


def _by_name(
    output: Mapping[str, Any],
    names: list[str],
    leaves: Sequence[Any],
    floats: list[int],
    depth: int,
    meanings: list[Meaning | None],
) -> None:
    unused = dict(output)
    for i in floats:
        key = _key_of(names[i], output)
        if key is not None:
            unused.pop(key, None)
            if leaves[i].dim() == depth and isinstance(meaning_of(output[key]), Classes) and len(floats) > 1:
                shapes = ", ".join(f"{quoted(names[j])}: {list(leaves[j].shape[depth:])}" for j in floats)
                raise ValueError(
                    f"output={{{quoted(key)}: {in_code(meaning_of(output[key]))}}}, but {quoted(names[i])} is a number without dimensions, "
                    f"such as a loss, which some models return first when called with labels; here the model gives {shapes}. Give the name of "
                    "the scores in your calls, or let the model return names (return_dict=True), which do not depend on labels"
                )
            meanings[i] = _checked(meaning_of(output[key]), leaves[i], depth, names, i)
    missing = [
        key
        for key, entry in unused.items()
        if not isinstance(meaning_of(entry), Mean | State | Detections) and key != "*"
    ]
    # a named output may be absent in this call (such as one of training only), unless an unnamed output suggests a wrong name
    unnamed = [i for i in floats if leaves[i].dim() > depth and _key_of(names[i], output) is None]
    if missing and (unnamed or len(missing) == len(output)):
        shapes = ", ".join(f"{quoted(names[i])}: {list(leaves[i].shape[depth:])}" for i in floats)
        raise ValueError(
            f"output names {', '.join(map(quoted, missing))}, which the model does not return; it returns "
            f"{shapes or 'no floating-point numbers'}"
            + (
                ". It returns a single output, whose meaning is given without a name: output=..."
                if names == [""]
                else ""
            )
        )


def _key_of(name: str, output: Mapping[str, Any]) -> str | None:
    """Return the longest key that is the name of an output or a prefix of its path; "*" matches any other."""
    keys = [key for key in output if key == name or name.startswith(f"{key}.")]
    return max(keys, key=len) if keys else "*" if "*" in output else None


def _checked(meaning: Meaning, leaf: Tensor, depth: int, names: list[str], i: int) -> Meaning:
    if not isinstance(meaning, Classes):
        return meaning
    if leaf.is_complex():
        raise ValueError(f'output="{meaning.short}": scores must be real numbers, and this output is complex')
    name = names[i]
    meaning.check_shape(leaf.shape[depth:], lambda line: f"{{{quoted(name)}: {line}}}" if name else line)
    return meaning.at_end(leaf.dim() - depth)


def quoted(name: str) -> str:
    """Return the name of an output as a key in code: a number as it is, otherwise in quotes."""
    return name if name.isdecimal() else repr(name)


def in_code(meaning: Meaning) -> str:
    """Return a meaning as in code, by its short name if it has one."""
    short = next((short for short, known in SHORT.items() if known == meaning), "")
    return f'"{short}"' if short else repr(meaning)


def check_numbers(meaning: Classes, scores: Tensor, warned: set[str]) -> None:
    """Raise ValueError if the values of scores contradict their meaning: checked at every call on the CPU, otherwise at the first.

    Args:
        meaning: declared meaning.
        scores: the scores.
        warned: keys of checks done so far, extended in place.
    """
    if scores.is_meta or not scores.numel() or values_unavailable():
        return
    key = f"numbers of {meaning.short}"
    if key in warned and (scores.device.type != "cpu" or isinstance(meaning, Logits)):
        return
    warned.add(key)
    if problem := meaning.problem(scores.detach()):
        raise ValueError(problem)


def targets_of(y: Any, names: Sequence[str], meanings: Sequence[Meaning | None]) -> list[Any]:
    """Return the target of each output, None for outputs without one.

    Args:
        y: a tensor, the target of the only output with a risk; or a tree whose leaves have the names of outputs.
        names: dotted names of the outputs.
        meanings: meanings of the outputs.

    Raises:
        ValueError: if it is ambiguous to which output a target belongs.
    """
    scored = [i for i, meaning in enumerate(meanings) if isinstance(meaning, Values | Classes)]
    targets: list[Any] = [None] * len(meanings)
    if children(y) is None:
        if not scored:
            raise ValueError(
                f"the target is a single {type(y).__name__}, and no output has a risk: numbers for a whole batch, such as a loss, have none. "
                "Also return the output that is compared with the target"
            )
        if len(scored) != 1:
            outputs = ", ".join(quoted(names[i]) for i in scored)
            raise ValueError(
                f"the target is a single {type(y).__name__}, and the outputs {outputs} have a risk: give a dict of targets with the names of "
                f"the outputs, or choose the output that it belongs to, output={{{quoted(names[scored[0]])}: ...}}"
            )
        targets[scored[0]] = y
        return targets
    by_name = dict(zip(tree_names(y), flatten(y)[0], strict=True))
    unknown = [name for name in by_name if name not in {names[i] for i in scored}]
    if unknown:
        raise ValueError(
            f"there are targets for {', '.join(map(quoted, unknown))}, but the outputs with a risk are "
            f"{', '.join(quoted(names[i]) for i in scored) or 'none'}: give targets the names of their outputs"
        )
    for i in scored:
        targets[i] = by_name.get(names[i])
    return targets


__all__ = ["check_numbers", "detections_at", "in_code", "quoted", "resolve", "targets_of"]
