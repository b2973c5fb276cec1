"""The wrappers that a diagnosis tries: all registered ones, with default settings and small sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.method import Call, Method
from ..core.registry import wrapper_class, wrapper_names
from ..core.settings import settings_of
from ..core.wrapper import COMMON
from .findings import Role

_MIN_BRANCHES = 2  # fewer can't differ from each other


@dataclass(frozen=True)
class Candidate:
    """A registered wrapper to try.

    Args:
        name: the name that it is registered under.
        make: returns the wrapper; keyword arguments override the small default settings. An error that it raises says that the default
            settings do not suffice.
        roles: what its methods do.
    """

    name: str
    make: Callable[..., Any]
    roles: frozenset[Role] = field(default=frozenset([Role.ANY]))


def candidates() -> list[Candidate]:
    """All registered wrappers, in alphabetical order."""
    return [_candidate(name) for name in wrapper_names()]


def _candidate(name: str) -> Candidate:
    try:
        cls = wrapper_class(name)
        sizes = _small_sizes(cls)
        roles = frozenset(role for method in cls(**sizes).make() for role in _roles(method))
    except Exception:  # raised again, and reported, when the wrapper is tried
        return Candidate(name, lambda **settings: wrapper_class(name)(**settings))
    return Candidate(name, lambda **settings: cls(**sizes, **settings), roles)


def _roles(method: Method) -> list[Role]:
    roles = {
        Role.ANY: True,
        Role.BRANCHES: not method.own_pass,
        Role.MEMBERS: method.members,
        Role.DEALS: method.deals(True) > 0,
        Role.OWN_PASS: method.own_pass,
    }
    return [role for role, applies in roles.items() if applies]


def _small_sizes(cls: Any) -> dict[str, int]:
    """Settings that reduce the number of branches, and, if branches are whole models, every other count as well."""
    wrapper = cls()
    kept: dict[str, int] = {}
    for described in settings_of(cls):
        name, value = described.name, getattr(wrapper, described.name)
        if name in COMMON or type(value) is not int or value <= _MIN_BRANCHES:
            continue
        with contextlib.suppress(TypeError, ValueError):  # the wrapper refuses such a small value
            smaller = cls(**kept, **{name: _MIN_BRANCHES})
            if any(method.members for method in smaller.make()) or _n_branches(smaller) < _n_branches(wrapper):
                kept[name] = _MIN_BRANCHES
    return kept


def _n_branches(wrapper: Any) -> int:
    axes = [method.axis(Call(training=False, return_risk=True)) for method in wrapper.make()]
    return sum(axis.size for axis in axes if axis is not None)
