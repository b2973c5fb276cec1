"""Exit codes and options that several commands share, without heavy imports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OK, FAILED, BAD_INPUT, DOUBTED, INTERRUPTED = 0, 1, 2, 3, 130


def add_grid(parser: Any, help: str) -> None:
    """Add the repeatable option ``-g NAME=A,B`` to a parser."""
    parser.add_argument("-g", "--grid", action="append", default=[], metavar="NAME=A,B", help=help)


def add_parameter(parser: Any, help: str) -> None:
    """Add the repeatable option ``-p NAME VALUE`` to a parser."""
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help=help)


def add_log_to(parser: Any, what: str) -> None:
    """Add the option ``--log-to TRACKER`` to a parser; `what` names the thing logged, for the help text."""
    parser.add_argument(
        "--log-to",
        choices=("tensorboard", "mlflow", "wandb"),
        help=f"also log {what} to this tracker, as a separate run",
    )


def axis(item: str, split: Callable[[str], list[str]]) -> tuple[str, list[str]]:
    """Return the name and the values of a ``-g`` option.

    Args:
        item: the option's argument, ``NAME=A,B``.
        split: function that splits the text after the equals sign into values.

    Raises:
        ValueError: item has no equals sign or no value.

    Example:
        >>> axis("seed = 0,1", lambda text: text.split(","))
        ('seed', ['0', '1'])
    """
    name, equals, text = (word.strip() for word in item.partition("="))
    if not equals:
        raise ValueError(f"-g takes NAME=A,B, not {item!r}")
    values = split(text)
    if not values:
        raise ValueError(f"-g {name}= names no values: write -g {name}=a,b")
    return name, values
