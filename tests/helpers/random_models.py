"""Random models: classes whose forward is a random sequence of what people write into theirs.

Each is a program in a file of its own, since the source of a model is read. Parts are right by themselves; what fails is mostly a combination
of them. They lie in `random_parts`, a text for each kind of input:

    [name] width 8 even
    statements of __init__
    ->
    statements of forward, which change x

in which {n} stands for a number of the part's own, {d} for the width of x and {h} for half of it. *width* is the width of x afterwards, if it
changes; *even* says that it must be even before.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers import conformance_table
from helpers.plain_copies import check_evaluation, check_training
from helpers.zoo import Case
from workbench.testing.models import seeded

PARTS = Path(__file__).parent / "random_parts"
OUTPUTS = 3
# wrappers that take all of these models, and those whose training steps are those of plain copies as well
TRAINED = ("vote", "vote_share1", "sculpt", "vote_sculpt", "sample_activations", "sample_weights")
WRAPPERS = (*TRAINED, "swag", "neo")


class Kind(NamedTuple):
    """A kind of input.

    Args:
        shape: shape of a row.
        axis: its axis whose length is the width.
        ends: last layer and result, one of which ends a model; the last layer is a linear one on pooled features, or applied everywhere.
    """

    shape: tuple[int, ...]
    axis: int
    ends: tuple[tuple[str, str], ...]


_LINEAR = "nn.Linear({d}, {outputs})"
KINDS = {
    "vectors": Kind((6,), 1, ((_LINEAR, "x"),)),
    "images": Kind((3, 8, 8), 1, (("nn.Conv2d({d}, {outputs}, 1)", "x"), (_LINEAR, "x.mean((2, 3))"))),
    "sequences": Kind((5, 6), 2, ((_LINEAR, "x"), (_LINEAR, "x[:, -1]"), (_LINEAR, "x.mean(1)"))),
}


class Part(NamedTuple):
    """Statements of a model, as in the text that they are read from."""

    init: str
    forward: str
    width: int
    even: bool


@functools.cache
def parts(kind: str) -> dict[str, Part]:
    """Return the parts of models for a kind of input, by name."""
    text = (PARTS / f"{kind}.txt").read_text(encoding="utf-8")
    texts = re.findall(r"^\[(.+)\](?: width (\d+))?( even)?\n((?:.*\n)*?)->\n((?:.+\n)+)", text, re.MULTILINE)
    return {name: Part(init, forward, int(width or 0), bool(even)) for name, width, even, init, forward in texts}


def dealt(kind: str, seed: int, length: int) -> list[str]:
    """Return the names of the parts of a random model; those of consecutive seeds are dealt from shuffled decks of all parts."""
    names = sorted(parts(kind))
    numbers = [divmod(number, len(names)) for number in range(seed * length, (seed + 1) * length)]
    return [random.Random(deck).sample(names, len(names))[position] for deck, position in numbers]


def source(kind: str, seed: int, length: int) -> tuple[list[str], str]:
    """Return the names of the parts of a random model, and its source."""
    shape, axis, ends = KINDS[kind]
    names, width = dealt(kind, seed, length), shape[axis - 1]
    init: list[str] = []
    forward: list[str] = []
    for number, name in enumerate(names):
        part = parts(kind)[name]
        if part.even and width % 2:
            forward.append(f"x = torch.cat([x, x.narrow({axis}, 0, 1)], {axis})")
            width += 1
        values = {"n": number, "d": width, "h": width // 2}
        init += part.init.format(**values).splitlines()
        forward += part.forward.format(**values).splitlines()
        width = part.width or width
    layer, entering = ends[seed % len(ends)]
    init.append(f"self.last = {layer.format(d=width, outputs=OUTPUTS)}")
    forward.append(f"return self.last({entering})")
    lines = ["class Net(nn.Module):", "    factor = 1.5", "", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in init] + ["", "    def forward(self, x):"]
    lines += [f"        {line}" for line in forward]
    preamble = (PARTS / "preamble.py").read_text(encoding="utf-8")
    return names, preamble + "\n\n" + "\n".join(lines) + "\n"


def random_case(kind: str, seed: int, length: int, folder: Path) -> Case:
    """Return a random model as a case of the zoo; its program is written into a folder."""
    names, text = source(kind, seed, length)
    path = folder / f"random_{kind}_{seed}_{length}.py"
    path.write_text(text, encoding="utf-8")
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def build() -> Any:
        with seeded(seed):
            return module.Net()

    def inputs(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(rows, *KINDS[kind].shape, generator=torch.Generator().manual_seed(seed)),), {}

    return Case(", ".join(names), build, inputs, frozenset())


def check(case: Case, wrapper: str) -> None:
    """Compare prediction, risks, gradients and buffers of a wrapped model with those of plain copies."""
    check_evaluation(case, conformance_table.WRAPPERS[wrapper])
    if wrapper in TRAINED:
        check_training(case, conformance_table.WRAPPERS[wrapper])


def outcome(kind: str, seed: int, length: int, wrapper: str, folder: Path) -> tuple[str, str]:
    """Return how a random model ended under a wrapper ("ok", "wrong" or "raw"), with the error or difference as one line."""
    case = random_case(kind, seed, length, folder)
    where = f"{wrapper} of model {seed} for {kind} ({case.name})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(case, wrapper)
    except AssertionError as error:
        return "wrong", f"{where}: {error}"[:400]
    except Exception as error:  # none of these models is to be refused
        return "raw", f"{where}: {type(error).__name__}: {error}"[:400]
    finally:
        del sys.modules[case.build().__class__.__module__]
    return "ok", where
