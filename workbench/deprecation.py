"""Old names that keep working for one version, each with a DeprecationWarning that says the new one."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# modules that moved, below `workbench.`; all below one of these moved with it
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
    """Say that a name goes with the next version.

    Args:
        old: what was used.
        new: what to use instead.
        stacklevel: as for `warnings.warn`, seen from the caller: 2 is the line that called it.
    """
    warnings.warn(
        f"{old} is deprecated and goes with the next version; use {new}", DeprecationWarning, stacklevel=stacklevel + 1
    )


def deprecated_names(module: str, names: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """A `__getattr__` for a module that still answers to old names.

    Args:
        module: its `__name__`.
        names: old name -> (the place of the object, "package.module:name"; what to use instead).
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, new = names[name]
        warn_deprecated(f"{module}.{name}", new)
        home, _, attribute = place.partition(":")
        return getattr(importlib.import_module(home), attribute)

    return __getattr__


class _MovedModules(MetaPathFinder, Loader):
    """Imports modules under the names that they had before they moved."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "workbench" and _moved(name) else None

    def exec_module(self, module: ModuleType) -> None:
        new = f"workbench.{_moved(module.__name__.removeprefix('workbench.'))}"
        warn_deprecated(f"the module {module.__name__}", new)
        sys.modules[module.__name__] = importlib.import_module(new)  # which the import then gives instead


def _moved(name: str) -> str:
    """Where a module is now, below `workbench.`; "" if it has not moved."""
    if name in MODULES:
        return MODULES[name]
    parent, _, last = name.rpartition(".")
    return f"{moved}.{last}" if parent and (moved := _moved(parent)) else ""


def answer_to_moved_modules() -> None:
    """Let `import workbench.wrapping` and the like work, also for pickles; before other finders, which would load a second copy."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())
