"""The parameters of a notebook: assignments in its cell tagged ``parameters``, read without running them."""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import require

if TYPE_CHECKING:
    from nbformat import NotebookNode

# the default of a parameter like `x = some_call()`: only running the cell tells its value
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)  # of the compiler: null bytes, too many brackets
COMPUTED: Any = type("Computed", (), {"__repr__": lambda self: "<computed by the notebook>"})()


def load_notebook(path: Path | str) -> NotebookNode:
    """Read a Python notebook, and say in plain words why where that can't be done.

    Args:
        path: path of an .ipynb file, of any notebook format.

    Returns:
        The notebook, in notebook format 4.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no notebook, or one for another language than Python.
    """
    nbformat = require("nbformat")
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.ipynb")], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise FileNotFoundError(f"there is no notebook {path}{hint}")
    try:
        nb = nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(f"{path} is not a Jupyter notebook: {str(error).splitlines()[0]}") from error
    kernel = nb.metadata.get("kernelspec", {})
    language = kernel.get("language") or nb.metadata.get("language_info", {}).get("name") or "python"
    if language.lower() not in ("python", "ipython"):
        raise ValueError(
            f"{path} is written for the kernel {kernel.get('name')!r} ({language}); only Python can be run"
        )
    return nb


def check_syntax(nb: NotebookNode, notebook: str) -> None:
    """Look whether every code cell can be read as Python, with IPython's own additions.

    Args:
        nb: the notebook, as nbformat gives it.
        notebook: what to call the notebook in errors.

    Raises:
        ValueError: if a cell can't be read, and isn't tagged ``raises-exception``; cell, line and text are in the message.

    Example:
        >>> import nbformat.v4 as v4
        >>> check_syntax(v4.new_notebook(cells=[v4.new_code_cell("%time x = await f()")]), "a.ipynb")
    """
    transform = require("IPython.core.inputtransformer2").TransformerManager().transform_cell
    for number, cell in enumerate(nb.cells, 1):
        if cell.cell_type != "code" or "raises-exception" in cell.metadata.get("tags", []):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the notebook's own strings; the kernel shows them
                compile(transform(cell.source), notebook, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        except UNREADABLE as error:
            line, text = getattr(error, "lineno", None), (getattr(error, "text", None) or "").strip()
            place = f"cell {number} ({cell.get('id', 'no id')}){f', line {line}' if line else ''}"
            reason = getattr(error, "msg", None) or str(error)
            raise ValueError(f"{notebook} can't be run: {place}: {reason}{f': {text!r}' if text else ''}") from error


def declared_parameters(nb: NotebookNode) -> dict[str, Any]:
    """The notebook's parameters and their defaults.

    Args:
        nb: the notebook, as nbformat gives it.

    Returns:
        name -> default, empty if no cell is tagged ``parameters``; a default that isn't a plain literal is `COMPUTED`.

    Raises:
        ValueError: if the cell isn't valid Python.

    Example:
        >>> import nbformat.v4 as v4
        >>> cell = v4.new_code_cell("epochs = 40\\nrate: float = 1e-3", metadata={"tags": ["parameters"]})
        >>> declared_parameters(v4.new_notebook(cells=[cell]))
        {'epochs': 40, 'rate': 0.001}
    """
    tagged = ((n, c) for n, c in enumerate(nb.cells, 1) if "parameters" in c.metadata.get("tags", []))
    number, cell = next(tagged, (0, None))
    if cell is None:
        return {}
    try:
        tree = ast.parse(cell.source)
    except UNREADABLE as error:
        place, text = getattr(error, "lineno", None) or "a", (getattr(error, "text", None) or str(error)).strip()
        raise ValueError(
            f"cell {number} ({cell.get('id', 'no id')}): line {place} of the parameters cell is not plain Python: {text!r}"
        ) from error
    declared: dict[str, Any] = {}
    for line in tree.body:
        if isinstance(line, ast.Assign):
            targets = line.targets
        elif isinstance(line, ast.AnnAssign) and line.value is not None:
            targets = [line.target]
        else:
            continue
        try:
            value = ast.literal_eval(line.value)
        except (*UNREADABLE, TypeError):
            value = COMPUTED
        declared.update({target.id: value for target in targets if isinstance(target, ast.Name)})
    return declared


def check_parameters(declared: Mapping[str, Any], values: Mapping[str, Any], notebook: str) -> dict[str, Any]:
    """Check values against the notebook's own parameters, since papermill takes any name and any type.

    Args:
        declared: name -> default, from `declared_parameters`.
        values: name -> value; numpy scalars and arrays are taken as plain numbers and lists.
        notebook: what to call the notebook in errors.

    Returns:
        The values that were given, as plain Python ones.

    Raises:
        ValueError: for a name that the notebook doesn't have; the nearest names are in the message.
        TypeError: for a value of another type than the default's. An int passes for a float; for None anything passes.

    Example:
        >>> check_parameters({"rate": 0.1}, {"rate": 1}, "train.ipynb")
        {'rate': 1}
    """
    checked = {}
    for name, value in values.items():
        default = _default(declared, name, notebook)
        value = _plain(value)
        if default is None or default is COMPUTED:
            allowed: tuple[type, ...] = (type(None), bool, int, float, str, list, dict)
        elif isinstance(default, float):
            allowed = (int, float)
        else:
            allowed = (list,) if isinstance(default, (list, tuple, set)) else (type(default),)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise TypeError(
                f"parameter {name} of {notebook} is {default!r} ({type(default).__name__}) by default and can't be "
                f"{value!r} ({type(value).__name__})"
            )
        checked[name] = value
    return checked


def parse_parameter(declared: Mapping[str, Any], name: str, text: str, notebook: str) -> Any:
    """Read a value given as text, as what the notebook's default says it is.

    Args:
        declared: name -> default, from `declared_parameters`.
        name: the parameter.
        text: its value; lists as ``a,b`` or ``[a, b]``.
        notebook: what to call the notebook in errors.

    Returns:
        The value, of the default's type.

    Raises:
        ValueError: if the notebook has no such parameter, or the text doesn't read as one of its type.

    Example:
        >>> parse_parameter({"rate": 0.1}, "rate", "1e-3", "train.ipynb")
        0.001
        >>> parse_parameter({"wrappers": ["vote"]}, "wrappers", "vote,sculpt", "train.ipynb")
        ['vote', 'sculpt']
    """
    default = _default(declared, name, notebook)
    if isinstance(default, str):
        return text
    try:
        if isinstance(default, bool):
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
        if isinstance(default, (int, float)):
            return type(default)(text)
        if isinstance(default, (list, tuple, set)):
            inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
            return [_literal(item) for item in split_values(inside)]
        value = _literal(text)
        if isinstance(default, dict) and not isinstance(value, dict):
            raise ValueError(text)
        return value
    except (KeyError, ValueError) as error:
        kind = type(default).__name__
        raise ValueError(
            f"parameter {name} of {notebook} is {default!r} ({kind}) by default; {text!r} is no {kind}"
        ) from error


def split_values(text: str) -> list[str]:
    """Split at commas that stand outside brackets and quotes.

    Example:
        >>> split_values("1, [2, 3], x")
        ['1', '[2, 3]', 'x']
    """
    pieces = re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|\([^)]*\)|'[^']*'|\"[^\"]*\"|[^,])+", text)
    return [stripped for piece in pieces if (stripped := piece.strip())]


def _default(declared: Mapping[str, Any], name: str, notebook: str) -> Any:
    if name not in declared:
        near = difflib.get_close_matches(name, declared, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        have = f"it has {', '.join(sorted(declared))}" if declared else "no cell of it is tagged 'parameters'"
        raise ValueError(f"{notebook} has no parameter {name!r}: {hint}{have}")
    return declared[name]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def _plain(value: Any) -> Any:
    # papermill would write a numpy number into the notebook as text
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple, set)) else value
