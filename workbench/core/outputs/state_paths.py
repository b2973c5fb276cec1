"""The setting `state=`: paths of outputs that are state, which the caller passes to the next call."""

from __future__ import annotations

from typing import Any

from ...engine.state import BranchedState, Path


def state_paths(setting: Any) -> tuple[Path, ...] | None:
    """Parse the setting `state=`.

    Args:
        setting: an index, name or dotted path of an output, or a tuple or list of them; () if no output is state, None if not given.

    Returns:
        Tuple of paths, each a tuple of names and indices, outermost first (also a valid `setting`); None for None.

    Example:
        >>> state_paths("cache.0"), state_paths((1, "memory")), state_paths(())
        ((('cache', '0'),), ((1,), ('memory',)), ())
    """
    if setting is None:
        return None
    entries = setting if isinstance(setting, tuple | list) else (setting,)
    return tuple(_path(entry, setting) for entry in entries)


def _path(entry: Any, setting: Any) -> Path:
    if isinstance(entry, tuple | list) and entry and all(_is_step(step) for step in entry):
        return tuple(entry)
    if isinstance(entry, str) and entry:
        return tuple(entry.split("."))
    if _is_step(entry):
        return (entry,)
    raise ValueError(
        f"state must be an index, a name or a dotted path of an output, or a tuple of them, such as state=1 or "
        f'state="past_key_values", not {setting!r}'
    )


def _is_step(step: Any) -> bool:
    return isinstance(step, int | str) and not isinstance(step, bool) and step != ""


__all__ = ["BranchedState", "state_paths"]
