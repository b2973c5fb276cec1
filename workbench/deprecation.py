"""Deprecated names that keep working for one version, each with a DeprecationWarning that gives the new name."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# old module name -> new module name, both relative to `workbench.`; submodules moved along with their package
MODULES = {
    "calling": "core.calls.predict",
    "committee": "core.crossfit",
    "dealing": "core.batches.dealing",
    "explanation": "core.explain",
    "function": "core.function",
    "inner": "core.runtime",
    "inputs": "core.batches.call_arguments",
    "members": "core.members",
    "method": "core.method",
    "persistence": "core.copying",
    "saving": "core.saving.files",
    "scaling": "core.standardize",
    "state": "core.saving.state_dict",
    "table": "core.ownership",
    "wrapped": "core.wrapped",
    "wrappers": "methods",
    "wrappers.densities.last_layer": "methods.densities.classes",
    "wrappers.densities.outputs": "methods.densities.scores",
    "wrappers.densities.rows": "methods.densities.features",
    "wrappers.kept": "methods.weight_sets",
    "wrapping": "core.wrapper",
}


def warn_deprecated(old: str, new: str, stacklevel: int = 2) -> None:
    """Emit a DeprecationWarning for a name that will be removed in the next version.

    Args:
        old: the deprecated name.
        new: what to use instead.
        stacklevel: as for `warnings.warn`, relative to the caller: 2 is the line that called the caller.
    """
    warnings.warn(
        f"{old} is deprecated and will be removed in the next version; use {new}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def deprecated_names(module: str, names: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """Make a module-level `__getattr__` that resolves deprecated names.

    Args:
        module: `__name__` of the module.
        names: old name -> (location of the object as "package.module:name", what to use instead).
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        location, new = names[name]
        warn_deprecated(f"{module}.{name}", new)
        module_name, _, attribute = location.partition(":")
        return getattr(importlib.import_module(module_name), attribute)

    return __getattr__


class _MovedModules(MetaPathFinder, Loader):
    """Meta path finder that imports moved modules under their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "workbench" and _new_name(name) else None

    def exec_module(self, module: ModuleType) -> None:
        new = f"workbench.{_new_name(module.__name__.removeprefix('workbench.'))}"
        warn_deprecated(f"the module {module.__name__}", new)
        sys.modules[module.__name__] = importlib.import_module(new)  # the import statement returns this entry


def _new_name(name: str) -> str:
    """Return the new name of a module relative to `workbench.`; "" if it has not moved."""
    if name in MODULES:
        return MODULES[name]
    parent, _, last = name.rpartition(".")
    return f"{new_parent}.{last}" if parent and (new_parent := _new_name(parent)) else ""


def answer_to_moved_modules() -> None:
    """Support imports and pickles that use old module names, such as `workbench.wrapping`.

    The finder goes first in `sys.meta_path`, because the standard finders would load a second copy of a moved package's submodules.
    """
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())
