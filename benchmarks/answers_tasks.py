"""Text tasks with known answers for a small language model, with test prompts from inside and outside the training domain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench import compose, fit, sample, vote
from workbench.errors import require
from workbench.outputs import Logits

VOTERS, DRAWS = 3, 5
WIDTH = 64
BLOCK = range(60, 80)  # numbers that are never added to each other in training
SHARE = 0.6  # share of the other sums that is trained on
KNOWN, UNSEEN = "abcdefghijkl", "mnop"  # letters to copy; the unseen ones are never trained on
KEYS = "abc"  # keys of each training table, in this order
WORDS, TABLES = 6_000, 2_000  # training prompts that are drawn
SCORES = {"logits": Logits(dim=-1)}
WRAPPERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: compose(output=SCORES),
    "sample": lambda: sample.Wrapper(DRAWS, output=SCORES),
    "vote": lambda: vote.Wrapper(VOTERS, output=SCORES),
}
Line = tuple[str, str]  # a question and its answer
Lines = tuple[list[Line], dict[str, list[Line]]]


class Characters:
    """Character-level tokenizer.

    Args:
        characters: vocabulary.
    """

    def __init__(self, characters: str = "0123456789+=") -> None:
        self.characters = characters
        self.pad_token_id, self.eos_token_id = len(characters), len(characters) + 1

    def __call__(self, prompt: str) -> dict[str, list[int]]:
        return {"input_ids": [self.characters.index(character) for character in prompt]}

    def decode(self, tokens: Tensor, skip_special_tokens: bool = True) -> str:
        return "".join(self.convert_ids_to_tokens([int(token) for token in tokens if token < self.pad_token_id]))

    def convert_ids_to_tokens(self, tokens: Sequence[int]) -> list[str]:
        return [(*self.characters, " ", "")[token] for token in tokens]


# ---- questions and answers: for training, and for testing by kind
def sums(prompts: int) -> Lines:
    """Return sums, such as "12+7=" and "19": training lines, and test lines by kind.

    Args:
        prompts: maximum number of test lines per kind.
    """
    generator = torch.Generator().manual_seed(0)

    def mixed(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [pairs[int(i)] for i in torch.randperm(len(pairs), generator=generator)]

    pairs = mixed([(a, b) for a in range(100) for b in range(100)])
    block = [pair for pair in pairs if pair[0] in BLOCK and pair[1] in BLOCK]
    others = [pair for pair in pairs if not (pair[0] in BLOCK and pair[1] in BLOCK)]
    cut = int(SHARE * len(others))
    single = mixed([(a, b) for a in range(10) for b in range(100)])
    longer = torch.randint(100, 1000, (prompts, 2), generator=generator).tolist()
    kinds = {
        "held out": [(f"{a}+{b}=", f"{a + b}") for a, b in others[cut:]],
        "unseen block": [(f"{a}+{b}=", f"{a + b}") for a, b in block],
        "zero in front": [(f"0{a}+{b}=", f"{a + b}") for a, b in single],
        "three digits": [(f"{a}+{b}=", f"{a + b}") for a, b in longer],
    }
    return [(f"{a}+{b}=", f"{a + b}") for a, b in others[:cut]], {kind: some[:prompts] for kind, some in kinds.items()}


def copies(prompts: int) -> Lines:
    """Return words to copy, such as "gabc=" and "gabc": training lines, and test lines by kind.

    Args:
        prompts: number of test lines per kind.
    """
    draw = _Draws(1)

    def line(shortest: int, longest: int, letters: str = KNOWN, unseen: bool = False) -> Line:
        word = [draw.one(letters) for _ in range(draw.number(shortest, longest))]
        if unseen:
            word[draw.number(0, len(word) - 1)] = draw.one(UNSEEN)
        return "".join([*word, "="]), "".join(word)

    known = [line(4, 6) for _ in range(WORDS)]
    kinds = {
        "held out": lambda: line(4, 6),
        "two letters": lambda: line(4, 6, "".join(draw.different(KNOWN, 2))),
        "unseen letter": lambda: line(4, 6, unseen=True),
        "longer": lambda: line(8, 10),
    }
    return known, {kind: _others(make, known, prompts) for kind, make in kinds.items()}


def lookups(prompts: int) -> Lines:
    """Return look-ups in tables of keys and digits, such as "a3b0c7?b" and "0": training lines, and test lines by kind.

    Args:
        prompts: number of test lines per kind.
    """
    draw = _Draws(2)

    def line(keys: list[str], asked: str) -> Line:
        rows = {key: str(draw.number(0, 9)) for key in keys}
        return f"{''.join(map(''.join, rows.items()))}?{asked}", rows[asked]

    def mixed() -> Line:
        keys = draw.different(KEYS, len(KEYS))
        return line(keys, draw.one(KEYS)) if keys != list(KEYS) else mixed()

    def with_unseen() -> Line:
        place, key = draw.number(0, len(KEYS) - 1), draw.one(UNSEEN)
        return line([*KEYS[:place], key, *KEYS[place + 1 :]], key)

    def without() -> Line:
        asked = draw.one(KEYS)
        question, _ = line(list(KEYS), asked)
        place = question.index(asked)
        # networks never see such a question in training, and so cannot know that the right answer is empty
        return question[:place] + question[place + 2 :], ""

    known = [line(list(KEYS), draw.one(KEYS)) for _ in range(TABLES)]
    kinds = {
        "held out": lambda: line(list(KEYS), draw.one(KEYS)),
        "other order": mixed,
        "unseen key": with_unseen,
        "longer table": lambda: line(list(KNOWN[: len(KEYS) + 2]), draw.one(KEYS)),
        "key not there": without,
    }
    return known, {kind: _others(make, known, prompts) for kind, make in kinds.items()}


class _Draws:
    """Random draws from a private generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=self.generator))

    def one(self, letters: str) -> str:
        return letters[self.number(0, len(letters) - 1)]

    def different(self, letters: str, count: int) -> list[str]:
        return [letters[int(i)] for i in torch.randperm(len(letters), generator=self.generator)[:count]]


def _others(make: Callable[[], Line], known: list[Line], count: int) -> list[Line]:
    """Return distinct lines outside the training lines: `count` of them, or as many as 100 * count draws give."""
    seen, lines = set(known), list[Line]()
    for _ in range(100 * count):
        if len(lines) < count and (line := make()) not in seen:
            seen.add(line)
            lines.append(line)
    return lines


# ---- tasks
def same_number(a: str, b: str) -> bool:
    """Whether two answers are the same number, or the same text if either is not a number."""
    return int(a) == int(b) if a.isdigit() and b.isdigit() else a == b


def same_text(a: str, b: str) -> bool:
    """Whether two answers are the same text."""
    return a == b


@dataclass(frozen=True)
class Task:
    """A text task, and the network and training that it needs.

    Args:
        lines: function from a number of prompts per kind to the training lines and the test lines by kind.
        characters: vocabulary.
        longest: maximum number of tokens of an answer, the end token included.
        positions: maximum number of tokens of a line.
        layers: number of layers of the network.
        batch_size, lr: batch size and learning rate of its training.
        same: function that says whether two answers mean the same.
    """

    lines: Callable[[int], Lines]
    characters: str = "0123456789+="
    longest: int = 6
    positions: int = 16
    layers: int = 1
    batch_size: int = 128
    lr: float = 0.005
    same: Callable[[str, str], bool] = same_number


TASKS = {
    "addition": Task(sums),
    "copying": Task(copies, f"{KNOWN}{UNSEEN}=", 12, 24, 2, 64, 0.003, same_text),
    "retrieval": Task(lookups, f"0123456789{KNOWN}{UNSEEN}?", 4, 20, 1, 64, 0.005, same_text),
}


def encoded(lines: list[Line], tokenizer: Characters) -> tuple[Tensor, Tensor]:
    """Return tokens [n, t] and the next token of each as its target [n, t]; -100 where the next token is not part of an answer."""
    longest = max(len(question + answer) for question, answer in lines)
    x, y = torch.full((len(lines), longest), tokenizer.pad_token_id), torch.full((len(lines), longest), -100)
    for row, (question, answer) in enumerate(lines):
        tokens = tokenizer(question + answer)["input_ids"]
        start = len(question) - 1
        x[row, : len(tokens)] = torch.tensor(tokens)
        y[row, start : len(tokens)] = torch.tensor([*tokens[start + 1 :], tokenizer.eos_token_id])
    return x, y


def trained(method: str, seed: int, epochs: int, name: str = "addition") -> Any:
    """Return a wrapped decoder in evaluation mode, trained on the lines of a task."""
    transformers = require("transformers")
    # its warning about padding does not apply: padding follows all learned tokens
    logging.getLogger("transformers").setLevel(logging.ERROR)
    task = TASKS[name]
    tokenizer = Characters(task.characters)
    special = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.GPT2Config(
        **special,
        pad_token_id=tokenizer.pad_token_id,
        vocab_size=len(tokenizer.characters) + 2,
        n_layer=task.layers,
        n_head=4,
        n_embd=WIDTH,
        n_positions=task.positions,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = WRAPPERS[method]()(transformers.GPT2LMHeadModel(config))
        fit(
            wrapped,
            encoded(task.lines(1)[0], tokenizer),
            epochs=epochs,
            batch_size=task.batch_size,
            lr=task.lr,
            standardize=False,
            seed=seed,
            progress=False,
        )
    return wrapped.eval()


def possible(cell: dict[str, Any]) -> str:
    """Return why a cell can't run here (transformers is not installed), or ""."""
    try:
        require("transformers")
    except ModuleNotFoundError as error:
        return str(error)
    return ""
