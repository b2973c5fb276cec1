"""State that the caller hands on: which outputs it is."""

from __future__ import annotations

from typing import Any

from ...engine.state import BranchedState, Path


def state_paths(setting: Any) -> tuple[Path, ...] | None:
    """The paths that the setting `state=` names.

    Args:
        setting: an index, a name or a dotted path of an output, a tuple or list of them; () for none, None if nobody said.

    Returns:
        Names and indices, outermost first; what it gives is also taken.

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
