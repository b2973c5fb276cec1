"""Exit codes and options that several commands share. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OK, FAILED, BAD_INPUT, DOUBTED, INTERRUPTED = 0, 1, 2, 3, 130


def add_grid(parser: Any, help: str) -> None:
    """Add ``-g NAME=A,B``, any number of times, to a parser."""
    parser.add_argument("-g", "--grid", action="append", default=[], metavar="NAME=A,B", help=help)


def add_parameter(parser: Any, help: str) -> None:
    """Add ``-p NAME VALUE``, any number of times, to a parser."""
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help=help)


def add_log_to(parser: Any, what: str) -> None:
    """Add ``--log-to TRACKER`` to a parser, for what it measures."""
    parser.add_argument(
        "--log-to",
        choices=("tensorboard", "mlflow", "wandb"),
        help=f"log {what} to this tracker as well, as a run of its own",
    )


def axis(item: str, split: Callable[[str], list[str]]) -> tuple[str, list[str]]:
    """Name and values of a ``-g``.

    Args:
        item: as it was given.
        split: makes values of what stands behind the sign of equality.

    Raises:
        ValueError: there is no such sign, or no value.

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
