"""Sums written by a small language model: which score of a generated answer tells the wrong ones, in and out of its domain?

A decoder of one layer learns from text to add numbers of one or two digits, without being told what a number is. It is then asked for sums that
it has not seen, for those of a block of numbers that never met in training, for numbers with a zero in front, and for longer numbers. Size
and epochs of the network are those with which it gets some held-out sums wrong; the scores of a shorter training had been seen by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench import compose, fit, metrics, sample, text, vote
from workbench.errors import require
from workbench.experiments.bench import table
from workbench.outputs import Logits

if TYPE_CHECKING:
    import pandas as pd

VOTERS, DRAWS, ANSWERS = 3, 5, 10
WIDTH, EPOCHS, SEEDS = 64, 30, 3
BLOCK = range(60, 80)  # numbers that are never added to one another in training
SHARE = 0.6  # of the other sums are trained on
PROMPTS = 500  # of each kind
SCORES = {"logits": Logits(dim=-1)}
WRAPPERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: compose(output=SCORES),
    "sample": lambda: sample.Wrapper(DRAWS, output=SCORES),
    "vote": lambda: vote.Wrapper(VOTERS, output=SCORES),
}


class Characters:
    """A tokenizer: each character is a token."""

    characters = "0123456789+="
    pad_token_id, eos_token_id = len(characters), len(characters) + 1

    def __call__(self, prompt: str) -> dict[str, list[int]]:
        return {"input_ids": [self.characters.index(character) for character in prompt]}

    def decode(self, tokens: Tensor, skip_special_tokens: bool = True) -> str:
        return "".join(self.convert_ids_to_tokens([int(token) for token in tokens if token < self.pad_token_id]))

    def convert_ids_to_tokens(self, tokens: Sequence[int]) -> list[str]:
        return [(*self.characters, " ", "")[token] for token in tokens]


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every seed and method."""
    return [
        {"method": method, "seed": seed, "epochs": 1 if smoke else EPOCHS, "prompts": 20 if smoke else PROMPTS}
        for seed in range(1 if smoke else SEEDS)
        for method in (reversed(WRAPPERS) if not smoke else ("plain", "vote"))  # what takes longest first
    ]


def possible(cell: dict[str, Any]) -> str:
    """Why a cell can't run here: transformers is not installed."""
    try:
        require("transformers")
    except ModuleNotFoundError as error:
        return str(error)
    return ""


def sums(prompts: int) -> tuple[list[str], dict[str, list[str]]]:
    """Sums as texts, "12+7=19", to train on, and of each kind to ask for.

    Args:
        prompts: how many of each kind, at most.
    """
    generator = torch.Generator().manual_seed(0)

    def mixed(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [pairs[int(i)] for i in torch.randperm(len(pairs), generator=generator)]

    every = mixed([(a, b) for a in range(100) for b in range(100)])
    block = [pair for pair in every if pair[0] in BLOCK and pair[1] in BLOCK]
    others = [pair for pair in every if not (pair[0] in BLOCK and pair[1] in BLOCK)]
    cut = int(SHARE * len(others))
    single = mixed([(a, b) for a in range(10) for b in range(100)])
    longer = torch.randint(100, 1000, (prompts, 2), generator=generator).tolist()
    kinds = {
        "held out": [f"{a}+{b}={a + b}" for a, b in others[cut:]],
        "unseen block": [f"{a}+{b}={a + b}" for a, b in block],
        "zero in front": [f"0{a}+{b}={a + b}" for a, b in single],
        "three digits": [f"{a}+{b}={a + b}" for a, b in longer],
    }
    return [f"{a}+{b}={a + b}" for a, b in others[:cut]], {kind: some[:prompts] for kind, some in kinds.items()}


def encoded(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Tokens [n, t], and of each the next one as target; -100 where that is not part of an answer."""
    tokenizer = Characters()
    longest = max(map(len, texts))
    x, y = torch.full((len(texts), longest), tokenizer.pad_token_id), torch.full((len(texts), longest), -100)
    for row, line in enumerate(texts):
        tokens = tokenizer(line)["input_ids"]
        asked = line.index("=")
        x[row, : len(tokens)] = torch.tensor(tokens)
        y[row, asked : len(tokens)] = torch.tensor([*tokens[asked + 1 :], tokenizer.eos_token_id])
    return x, y


def trained(method: str, seed: int, epochs: int) -> Any:
    """A wrapped decoder in evaluation mode, trained on sums."""
    transformers = require("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # padding is behind all that is learned
    tokenizer = Characters()
    special = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.GPT2Config(
        **special,
        pad_token_id=tokenizer.pad_token_id,
        vocab_size=len(tokenizer.characters) + 2,
        n_layer=1,
        n_head=4,
        n_embd=WIDTH,
        n_positions=16,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = WRAPPERS[method]()(transformers.GPT2LMHeadModel(config))
        rows = encoded(sums(1)[0])
        fit(
            wrapped,
            rows,
            epochs=epochs,
            batch_size=128,
            lr=0.005,
            standardize=False,
            seed=seed,
            progress=False,
        )
    return wrapped.eval()


def answered(wrapped: Any, asked: list[str], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Which greedy answers are wrong [n], and scores of them, higher for less trust: of the tokens, and of samples.

    Args:
        wrapped: the decoder.
        asked: sums with their results.
        seed: of the samples.
    """
    prompts, results = zip(*(line.split("=") for line in asked), strict=True)
    options: dict[str, Any] = {"tokenizer": Characters(), "max_new_tokens": 6}
    questions = [f"{prompt}=" for prompt in prompts]
    written = text.generate(wrapped, questions, **options)
    wrong = torch.tensor([answer != result for answer, result in zip(written.texts or (), results, strict=True)])
    scores = {
        "log-probability": -written.log_prob,
        "mean log-probability": -written.mean_log_prob,
        "mean entropy": written.mean_entropy,
        "max entropy": written.max_entropy,
    }
    if len(written.member_log_probs) > 1:
        scores["mean aleatoric"] = written.risk.aleatoric.nanmean(1)
        scores["mean epistemic"] = written.risk.epistemic.nanmean(1)
        scores["max epistemic"] = written.risk.epistemic.nan_to_num(0).amax(1)
        scores["perplexity spread"] = written.perplexity_spread
    drawn = text.generate(
        wrapped, questions, do_sample=True, top_k=0, num_return_sequences=ANSWERS, seed=seed, **options
    )
    scores["self-consistency"] = -torch.tensor(drawn.self_consistency())
    scores["semantic entropy"] = torch.tensor(drawn.semantic_entropy(same_number))
    scores["semantic entropy, discrete"] = torch.tensor(drawn.semantic_entropy(same_number, discrete=True))
    return wrong, scores


def same_number(a: str, b: str) -> bool:
    """Whether two answers are the same number, or the same text where one of them is none."""
    return int(a) == int(b) if a.isdigit() and b.isdigit() else a == b


def run(method: str, seed: int, epochs: int, prompts: int) -> list[dict[str, Any]]:
    """One row for each score and kind of prompt, and of all kinds together."""
    wrapped = trained(method, seed, epochs)
    found = {kind: answered(wrapped, asked, seed) for kind, asked in sums(prompts)[1].items()}
    usual = found["held out"][1]
    found["all"] = (
        torch.cat([wrong for wrong, _ in found.values()]),
        {name: torch.cat([scores[name] for _, scores in found.values()]) for name in usual},
    )
    results = []
    for kind, (wrong, scores) in found.items():
        mixed = 0 < int(wrong.sum()) < len(wrong)
        foreign = kind not in ("held out", "all")
        for name, score in scores.items():
            results.append(
                {
                    "prompts_of": kind,
                    "score": name,
                    "accuracy": 1 - wrong.double().mean().item(),
                    "error_auroc": metrics.error_auroc(score, wrong).item() if mixed else float("nan"),
                    "auroc": metrics.auroc(usual[name], score).item() if foreign else float("nan"),
                }
            )
    return results


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """A table of right answers, and one of the scores for each method."""
    import pandas as pd

    kinds = list(dict.fromkeys(frame["prompts_of"]))
    right, telling = [], []
    for method, group in sorted(frame.groupby("method"), key=lambda found: list(WRAPPERS).index(found[0])):
        shares = group.groupby("prompts_of")["accuracy"].mean()
        right.append({"method": str(method), **{kind: f"{shares[kind]:.3f}" for kind in kinds}})
        for score, some in group.groupby("score", sort=False):
            means = some.groupby("prompts_of")[["error_auroc", "auroc"]].mean()
            row = {"method": str(method), "score": str(score)}
            row |= {f"wrong: {kind}": _number(means.loc[kind, "error_auroc"]) for kind in kinds}
            row |= {
                f"foreign: {kind}": _number(means.loc[kind, "auroc"])
                for kind in kinds
                if kind not in ("held out", "all")
            }
            telling.append(row)
    columns = ["method", "score", *(name for name in telling[0] if any(row[name] for row in telling) and ":" in name)]
    seeds, first = frame["seed"].nunique(), sums(1)[0]
    networks = f"Mean of {seeds} networks" if seeds > 1 else "One network"
    return f"""{networks} a row. A GPT-2 of one layer and {WIDTH} channels, a character a token, {EPOCHS} passes
over {len(first):,} sums of numbers from 0 to 99. *Held out*: other sums of such numbers. *Unseen block*: both numbers from {BLOCK.start} to
{BLOCK.stop - 1}, which never meet in training. *Zero in front*: 07+35. *Three digits*: both numbers have three. `sample` has {DRAWS} noisy
passes, `vote` {VOTERS} voters. Dropout costs so small a network much of its accuracy.

Share of right answers, greedy, by kind of prompt:

{table(pd.DataFrame(right))}

*Wrong*: AUROC of the wrong answers among those of a kind, or of all kinds together; none where all are wrong. *Foreign*: AUROC of
prompts of this kind against held-out ones, whatever the answer. Log-probabilities are negated, so that higher means less trust.
Self-consistency and semantic entropy are of {ANSWERS} answers drawn for each prompt, the same number being the same meaning; *discrete*
counts each answer alike.

{table(pd.DataFrame(telling)[columns])}"""


def _number(value: float) -> str:
    return f"{value:.3f}" if value == value else ""
