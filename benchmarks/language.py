"""A small language model of documentation or of code: which risk tells its wrong next characters, and which texts that are not its kind?

A decoder learns from the docstrings of Python's standard library, another from its code without docstrings and comments. Both are asked to go on
with held-out modules of both kinds and with the pages of this package's documentation, which are prose with code in it. Its size and epochs are
what a quarter of an hour on one core allows; nothing was chosen by these results.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from answers_tasks import DRAWS, VOTERS, WRAPPERS
from language_texts import BATCH, CHARACTERS, KINDS, LAYERS, LENGTH, WIDTH, texts, trained, windows
from torch import Tensor

from workbench import metrics
from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd

SEEDS, EPOCHS, PIECES = 3, 3, 8192
ASKED = 300  # pieces of each kind
READ = 16  # characters that are read before the first that counts


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every seed, text to learn from and method."""
    return [
        {
            "method": method,
            "learned": learned,
            "seed": seed,
            "epochs": 1 if smoke else EPOCHS,
            "pieces": 32 if smoke else PIECES,
            "asked": 4 if smoke else ASKED,
        }
        for seed in range(1 if smoke else SEEDS)
        for learned in (KINDS[:2] if not smoke else KINDS[:1])
        for method in (reversed(WRAPPERS) if not smoke else ("plain", "vote"))  # what takes longest first
    ]


@torch.no_grad()
def predict(wrapped: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities [n, t, characters] of the next characters, and scores [n, t] of them, higher for less trust."""
    several = bool(wrapped._workbench.methods)
    probs, risks = [], []
    for part in x.split(50):
        output, risk = wrapped(part, return_risk=True) if several else (wrapped(part), None)
        probs.append(output.logits.log_softmax(-1))
        risks.append({} if risk is None else {name: risk[name].logits for name in risk.names()})
    logs = torch.cat(probs)
    scores = {name: torch.cat([some[name] for some in risks]) for name in risks[0]}
    entropy = torch.special.entr(logs.exp()).sum(-1)
    return logs, {"1 - highest probability": 1 - logs.amax(-1).exp(), "total": entropy, **scores}


def run(method: str, learned: str, seed: int, epochs: int, pieces: int, asked: int) -> list[dict[str, Any]]:
    """One row for each kind of text that is asked for, and each score."""
    wrapped = trained(method, learned, seed, epochs, pieces)
    rows, by_text = [], {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for kind in sorted(KINDS, key=lambda kind: kind != learned):  # its own first, which others are compared with
            x, y = windows(texts(kind)[1], asked, 1)
            logs, scores = predict(wrapped, x)
            logs, y = logs[:, READ:].double(), y[:, READ:]
            scores = {name: values[:, READ:].double() for name, values in scores.items()}
            wrong = logs.argmax(-1) != y
            nll = -logs.gather(-1, y[..., None])[..., 0]
            same = {
                "kind": kind,
                "python": platform.python_version(),
                "accuracy": 1 - wrong.double().mean().item(),
                "perplexity": nll.mean().exp().item(),
                "ece": metrics.ece(logs.exp().flatten(0, 1), y.flatten()).item(),
            }
            by_text[kind] = {
                **{name: values.mean(1) for name, values in scores.items()},
                "perplexity": nll.mean(1).exp(),
            }
            for name, values in by_text[kind].items():
                by_token, mixed = scores.get(name), bool(wrong.any()) and not bool(wrong.all())
                foreign = kind != learned
                rows.append(
                    {
                        **same,
                        "score": name,
                        "error_auroc": metrics.error_auroc(by_token.flatten(), wrong.flatten()).item()
                        if by_token is not None and mixed
                        else float("nan"),
                        "auroc": metrics.auroc(by_text[learned][name], values).item() if foreign else float("nan"),
                    }
                )
    return rows


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Of each text to learn from a table of the predictions and one of the scores."""
    seeds = frame["seed"].nunique()
    versions = ", ".join(sorted(set(map(str, frame["python"]))))
    sections = [_section(frame[frame["learned"] == learned], learned) for learned in dict.fromkeys(frame["learned"])]
    networks = f"{seeds} network{'s' if seeds > 1 else ''}"
    return f"""Means of {networks} a row, and standard deviations over them. The standard library is that of Python {versions}.
GPT-2 of {LAYERS} layers and {WIDTH} channels, one of {len(CHARACTERS)} characters a token, {EPOCHS} passes over {PIECES:,} pieces of
{LENGTH} characters, {BATCH} a step. Every fifth module is held out. `sample` has {DRAWS} noisy passes, `vote` {VOTERS} voters.

*Wrong*: AUROC of the wrong next characters (the most probable one is not that of the text) among {ASKED} pieces of a kind, after the first
{READ} characters of each. *Foreign*: AUROC of pieces of this kind against held-out ones of the kind that was learned, by the mean over the
characters of a piece; of the total risk that is the mean entropy of the tokens. *Perplexity* knows the text that is there, as the others do not.

{chr(10).join(sections)}"""


def _section(frame: pd.DataFrame, learned: str) -> str:
    import pandas as pd

    kinds = list(dict.fromkeys(frame["kind"]))
    groups = sorted(frame.groupby("method"), key=lambda named: list(WRAPPERS).index(str(named[0])))
    quality, telling = [], []
    for method, group in groups:
        row = {"method": str(method)}
        for kind in kinds:
            runs = group[group["kind"] == kind].drop_duplicates("seed")
            for name, label in (("accuracy", "right"), ("perplexity", "perplexity"), ("ece", "ECE")):
                row[f"{kind}: {label}"] = _number(runs[name], 3 if name != "perplexity" else 2)
        quality.append(row)
        for score, runs in group.groupby("score", sort=False):
            by_kind = {kind: runs[runs["kind"] == kind] for kind in kinds}
            row = {"method": str(method), "score": str(score)}
            row |= {f"wrong: {kind}": _number(by_kind[kind]["error_auroc"]) for kind in kinds}
            row |= {f"foreign: {kind}": _number(by_kind[kind]["auroc"]) for kind in kinds if kind != learned}
            telling.append(row)
    return f"""### learned from {learned}

{table(pd.DataFrame(quality))}

{table(pd.DataFrame(telling))}
"""


def _number(values: pd.Series, digits: int = 3) -> str:
    if values.isna().all():
        return ""
    spread = f" ± {values.std(ddof=0):.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{spread}"
