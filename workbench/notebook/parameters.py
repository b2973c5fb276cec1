"""Parameters of a notebook: the assignments in its cell tagged ``parameters``, parsed without running them."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import itertools
import sys
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import require
from .values import to_json

if TYPE_CHECKING:
    from nbformat import NotebookNode

# the latter three for null bytes and deep nesting
PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
# the default of a parameter such as `x = some_call()`, whose value is known only after running the cell
COMPUTED: Any = type("Computed", (), {"__repr__": lambda self: "<computed by the notebook>"})()


def skip_iri_grammars() -> None:
    """Import jsonschema, which nbformat needs, without its checks of IRIs, whose grammars take a second to build.

    Notebooks hold no IRIs. For processes of this package only: user code may want these checks.
    """
    if "jsonschema" in sys.modules or "rfc3987_syntax" in sys.modules:
        return
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # an import raises ImportError, which jsonschema expects
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("jsonschema")
    finally:
        del sys.modules["rfc3987_syntax"]


def load_notebook(path: Path | str) -> NotebookNode:
    """Read a Python notebook.

    Args:
        path: path of an .ipynb file, of any notebook format.

    Returns:
        The notebook, in notebook format 4.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a notebook, or a notebook of another language than Python.
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
    """Check the syntax of every code cell, including IPython's extensions.

    Args:
        nb: notebook, as read by nbformat.
        notebook: name of the notebook for error messages.

    Raises:
        ValueError: a cell has a syntax error and is not tagged ``raises-exception``; cell, line and text are in the message.

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
                warnings.simplefilter("ignore")  # the kernel shows the warnings about the notebook's code
                # not the name of a file, since Python would quote that file in its error
                compile(
                    transform(cell.source), f"<{notebook}>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
                )
        except PARSE_ERRORS as error:
            line, text = getattr(error, "lineno", None), (getattr(error, "text", None) or "").strip()
            place = f"cell {number} ({cell.get('id', 'no id')}){f', line {line}' if line else ''}"
            reason = getattr(error, "msg", None) or str(error)
            raise ValueError(f"{notebook} can't be run: {place}: {reason}{f': {text!r}' if text else ''}") from error


def declared_parameters(nb: NotebookNode) -> dict[str, Any]:
    """Return the notebook's parameters and their defaults.

    Args:
        nb: notebook, as read by nbformat.

    Returns:
        name -> default, empty if no cell is tagged ``parameters``; a default that is not a literal is `COMPUTED`.

    Raises:
        ValueError: the cell is not valid Python.

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
    except PARSE_ERRORS as error:
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
        except (*PARSE_ERRORS, TypeError):
            value = COMPUTED
        declared.update({target.id: value for target in targets if isinstance(target, ast.Name)})
    return declared


def check_parameters(declared: Mapping[str, Any], values: Mapping[str, Any], notebook: str) -> dict[str, Any]:
    """Check values against the notebook's parameters, since papermill accepts any name and any type.

    Args:
        declared: name -> default, from `declared_parameters`.
        values: name -> value; numpy scalars and arrays become numbers and lists.
        notebook: name of the notebook for error messages.

    Returns:
        The values as plain Python objects.

    Raises:
        ValueError: the notebook has no such parameter; the message suggests similar names.
        TypeError: the type of a value differs from that of the default, or it holds what JSON cannot. An int may replace a float, and anything
            may replace None.
        ValueError: a text has lone surrogates.

    Example:
        >>> check_parameters({"rate": 0.1}, {"rate": 1}, "train.ipynb")
        {'rate': 1}
    """
    checked = {}
    for name, value in values.items():
        default = _default(declared, name, notebook)
        value = plain(value)
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
        if not is_json(value):
            raise TypeError(
                f"parameter {name} of {notebook} can't be {value!r:.200}: lists hold numbers, texts, None, lists and dicts, and dicts have keys "
                "that are texts"
            )
        to_json(value, f"parameter {name} of {notebook}")  # which refuses texts that no notebook can hold
        checked[name] = value
    return checked


def parse_parameter(declared: Mapping[str, Any], name: str, text: str, notebook: str) -> Any:
    """Parse the text of a parameter's value, according to the type of the notebook's default.

    Args:
        declared: name -> default, from `declared_parameters`.
        name: name of the parameter.
        text: value as text; lists as ``a,b`` or ``[a, b]``. The items of a list of texts are texts, with or without quotes.
        notebook: name of the notebook for error messages.

    Returns:
        The value, of the default's type.

    Raises:
        ValueError: the notebook has no such parameter, or the text can't be parsed as its type.

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
            return _items(default, text)
        value = _literal(text)
        if isinstance(default, dict) and not isinstance(value, dict):
            raise ValueError(text)
        return value
    except (KeyError, ValueError) as error:
        kind = type(default).__name__
        raise ValueError(
            f"parameter {name} of {notebook} is {default!r} ({kind}) by default; {text!r} can't be read as {kind}"
        ) from error


def split_values(text: str) -> list[str]:
    """Split a text at the commas outside of brackets and quotes.

    Example:
        >>> split_values("1, [2, [3, 4]], x")
        ['1', '[2, [3, 4]]', 'x']
    """
    pieces, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and not pieces[-1][-1:].isalnum():  # an apostrophe, as in don't, opens no quotes
            quote = character
        else:
            depth = max(0, depth + (character in "([{") - (character in ")]}"))
        if character == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += character
    return [stripped for piece in pieces if (stripped := piece.strip())]


def unquoted(text: str) -> str:
    """Return a text without the quotes around it, if it has any.

    Example:
        >>> unquoted("'a,b'"), unquoted("none")
        ('a,b', 'none')
    """
    value = _literal(text) if text[:1] in ("'", '"') else text
    return value if isinstance(value, str) else text


def _items(default: list[Any] | tuple[Any, ...] | set[Any], text: str) -> list[Any]:
    """Return the items of a list's text: texts, numbers or lists if those of the default are."""
    items, lists = split_values(_inside(text, default)), (list, tuple, set)
    if _all(default, str):
        return [unquoted(item) for item in items]
    values = [_literal(item) for item in items]
    if _all(default, int, float) and any(isinstance(value, str) for value in values):
        raise ValueError(text)
    if _all(default, *lists) and not all(isinstance(value, lists) for value in values):
        return [_literal(item) for item in split_values(text)]  # one item, whose brackets are its own
    return values


def _all(items: Collection[Any], *kinds: type) -> bool:
    """Return whether there are items, and all are of these kinds."""
    return bool(items) and all(isinstance(item, kinds) for item in items)


def _inside(text: str, default: list[Any] | tuple[Any, ...] | set[Any]) -> str:
    """Return the text of a list's items, without the brackets around all of them."""
    text = text.strip()
    for kind, (opening, closing) in ((type(default), "[]"), (tuple, "()"), (set, "{}")):
        if isinstance(default, kind) and text.startswith(opening) and text.endswith(closing):
            inside = text[1:-1]
            # the first bracket of "[1, 2], [3]" ends before the last one does
            depths = itertools.accumulate((c == opening) - (c == closing) for c in inside)
            return inside if min(depths, default=0) >= 0 else text
    return text


def _default(declared: Mapping[str, Any], name: str, notebook: str) -> Any:
    if name not in declared:
        near = difflib.get_close_matches(name, declared, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        untagged = "no cell of it is tagged 'parameters': give that tag to the cell with the defaults (in JupyterLab the gears at the right)"
        have = f"it has {', '.join(sorted(declared))}" if declared else untagged
        raise ValueError(f"{notebook} has no parameter {name!r}: {hint}{have}")
    return declared[name]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def plain(value: Any) -> Any:
    """Return a value with numpy numbers, arrays, tuples and sets as numbers and lists; sets are sorted, since their order is random.

    Example:
        >>> plain({"a": {2, 1}, "b": (1, 2)})
        {'a': [1, 2], 'b': [1, 2]}
    """
    # papermill would write numpy numbers into the notebook as strings
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, set):
        try:
            value = sorted(value)
        except TypeError:
            value = sorted(value, key=repr)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def is_json(value: Any) -> bool:
    """Return whether a plain value has only JSON types, and dicts only keys that are texts."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or isinstance(value, (bool, int, float, str))
