"""Texts of the `language` benchmark, which are on every machine, and the small decoders that are trained on them."""

from __future__ import annotations

import ast
import functools
import inspect
import string
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from answers_tasks import WRAPPERS
from torch import Tensor

from workbench import fit
from workbench.errors import require

LENGTH = 64  # characters per piece
WIDTH, LAYERS, BATCH, LR = 64, 2, 32, 0.003
HELD_OUT = 5  # every fifth module is held out
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
KINDS = ("docstrings", "code", "pages")  # networks learn the first two
DOCS = Path(__file__).parents[1] / "docs"


def texts(kind: str) -> tuple[str, str]:
    """Return the text to train on and the held-out text, without characters outside `CHARACTERS`.

    Args:
        kind: "docstrings" or "code" of the single-file modules of Python's standard library, or "pages" of this package's documentation, which
            are all held out and leave out the page of benchmarks, since it contains the results.
    """
    if kind == "pages":
        pages = sorted(path for path in DOCS.rglob("*.md") if path.name != "benchmarks.md")
        return "", _known("\n\n".join(path.read_text(encoding="utf-8") for path in pages))
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path for name in sorted(sys.stdlib_module_names) if (path := folder / f"{name}.py").is_file()]
    parts = [_parts(path)[kind == "code"] for path in modules]
    learned = "\n\n".join(part for i, part in enumerate(parts) if i % HELD_OUT)
    return _known(learned), _known("\n\n".join(parts[::HELD_OUT]))


@functools.cache
def _parts(path: Path) -> tuple[str, str]:
    """Return the docstrings of a module, and its code without docstrings and comments."""
    tree, docstrings = ast.parse(path.read_text(encoding="utf-8")), []
    for node in _documented(tree):
        docstrings.append(inspect.cleandoc(ast.get_docstring(node, clean=False) or ""))
        node.body = node.body[1:] or [ast.Pass()]
    return "\n\n".join(docstrings), ast.unparse(tree)


def _documented(tree: ast.Module) -> Iterator[Any]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node))


def _known(text: str) -> str:
    return "".join(character for character in text if character in CHARACTERS)


def windows(text: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw non-overlapping pieces of a text: characters [n, LENGTH] and the next character of each [n, LENGTH].

    Args:
        text: text of known characters.
        count: maximum number of pieces.
        seed: seed of the draw.
    """
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    n = (len(text) - 1) // LENGTH
    tokens = torch.tensor([numbers[character] for character in text[: n * LENGTH + 1]])
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:count]
    return tokens[:-1].view(n, LENGTH)[drawn], tokens[1:].view(n, LENGTH)[drawn]


def trained(method: str, kind: str, seed: int, epochs: int, count: int) -> Any:
    """Return a trained wrapped decoder in evaluation mode.

    Args:
        method: one of the wrappers of `answers`.
        kind: kind of text to train on.
        seed: seed of weights, order and noise; all seeds share the same pieces.
        epochs: passes over the pieces.
        count: number of pieces.
    """
    transformers = require("transformers")
    config = transformers.GPT2Config(
        vocab_size=len(CHARACTERS),
        n_layer=LAYERS,
        n_head=4,
        n_embd=WIDTH,
        n_positions=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = WRAPPERS[method]()(transformers.GPT2LMHeadModel(config))
        pieces = windows(texts(kind)[0], count, 0)
        fit(wrapped, pieces, epochs=epochs, batch_size=BATCH, lr=LR, standardize=False, seed=seed, progress=False)
    return wrapped.eval()
