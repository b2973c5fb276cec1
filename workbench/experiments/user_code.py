"""The user's own code that a file or a notebook runs: itself, and what it imports from its folder or packages of theirs."""

from __future__ import annotations

import ast
import hashlib
import itertools
import os
from pathlib import Path

# folders of packages that are not the user's
INSTALLED, OWN = {"site-packages", "dist-packages"}, Path(__file__).parents[1]


def digest(*files: Path) -> str:
    """Return a digest of the user's files and of those of theirs that they import, as "sha256:" and 12 hexadecimal digits."""
    hasher = hashlib.sha256()
    for file in files:
        texts = imported(file.read_text(encoding="utf-8"), file)
        for name, text in sorted(texts.items()):
            hasher.update(f"{name}\n{text}\n".encode())
    return f"sha256:{hasher.hexdigest()[:12]}"


def imported(code: str, path: Path) -> dict[str, str]:
    """Return a code and the texts of all files that it imports, directly or indirectly, from its folder or the packages that it is in or beside.

    Installed packages are left out.

    Args:
        code: Python code.
        path: file that the code is in.

    Returns:
        name -> text; names are relative to the folder, so that they are the same wherever it is.

    Raises:
        SyntaxError: the code, or that of one of the files, is not Python.
    """
    first = path.resolve()
    top = next(folder for folder in first.parents if not (folder / "__init__.py").is_file())
    texts: dict[str, str] = {}
    waiting = [first]
    while waiting:
        file = waiting.pop()
        name = Path(os.path.relpath(file, first.parent)).as_posix()
        if name in texts or (file != first and (OWN in file.parents or not INSTALLED.isdisjoint(file.parts))):
            continue
        texts[name] = code if file == first else file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(texts[name], file.name)):
            folders = [first.parent, top]
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
                folders = [file.parents[node.level - 1]] if node.level else folders
            else:
                continue
            waiting += [other for folder in folders for module in modules for other in _files_of(folder, module)]
    return texts


def _files_of(folder: Path, module: str) -> list[Path]:
    """Return the files that importing a module, or a name in it, runs: of all packages on the way, and its own."""
    _, *places = itertools.accumulate(module.split("."), Path.joinpath, initial=folder)
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    return [file for file in (folder / "__init__.py", *files) if file.is_file()]


__all__ = ["digest", "imported"]
