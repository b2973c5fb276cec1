"""Built-in wrappers and their methods, one module each."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from ..core.registry import build_in

BUILT_IN = ("augment", "laplace", "neo", "sample", "sculpt", "snapshot", "swag", "vote")

for _name in BUILT_IN:
    build_in(_name, f"{__name__}.{_name}:Wrapper")


class WrapperModule(ModuleType):
    """Module of a wrapper, which tells who calls it, as in `vote(5)(model)`, to call the wrapper in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        raise TypeError(f"{name} is a module; its wrapper is {name}.Wrapper, as in {name}.Wrapper(...)(model)")

    def __reduce__(self) -> tuple[Any, tuple[str]]:  # by name, as cloudpickle does with plain modules
        return importlib.import_module, (self.__name__,)
