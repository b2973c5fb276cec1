"""Built-in wrappers and their methods, one module each."""

from __future__ import annotations

from ..core.registry import build_in

BUILT_IN = ("augment", "laplace", "neo", "sample", "sculpt", "snapshot", "swag", "vote")

for _name in BUILT_IN:
    build_in(_name, f"{__name__}.{_name}:Wrapper")
