"""A small language model of documentation or of code: which risks detect wrong next characters, and which detect texts of another kind?

One decoder learns from the docstrings of Python's standard library, another from its code without docstrings and comments. Both predict held-out
modules of both kinds and the pages of this package's documentation, which mix prose and code. Size and epochs are what a quarter of an hour on
one core allows; nothing was chosen by these results.
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
ASKED = 300  # test pieces of each kind
READ = 16  # characters of context before the first prediction that is scored


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each seed, training text and method."""
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
        for method in (reversed(WRAPPERS) if not smoke else ("plain", "vote"))  # slowest first
    ]


@torch.no_grad()
def predict(wrapped: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities [n, t, characters] of the next characters, and uncertainty scores [n, t] of each."""
    has_risks = bool(wrapped._workbench.methods)
    batches, risks = [], []
    for part in x.split(50):
        output, risk = wrapped(part, return_risk=True) if has_risks else (wrapped(part), None)
        batches.append(output.logits.log_softmax(-1))
        risks.append({} if risk is None else {name: risk[name].logits for name in risk.names()})
    log_probs = torch.cat(batches)
    scores = {name: torch.cat([batch[name] for batch in risks]) for name in risks[0]}
    entropy = torch.special.entr(log_probs.exp()).sum(-1)
    return log_probs, {"1 - highest probability": 1 - log_probs.amax(-1).exp(), "total": entropy, **scores}


def run(method: str, learned: str, seed: int, epochs: int, pieces: int, asked: int) -> list[dict[str, Any]]:
    """Return one row for each kind of test text and score."""
    wrapped = trained(method, learned, seed, epochs, pieces)
    rows, by_text = [], {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # the learned kind first: others are compared with it
        for kind in sorted(KINDS, key=lambda kind: kind != learned):
            x, y = windows(texts(kind)[1], asked, 1)
            log_probs, scores = predict(wrapped, x)
            log_probs, y = log_probs[:, READ:].double(), y[:, READ:]
            scores = {name: values[:, READ:].double() for name, values in scores.items()}
            wrong = log_probs.argmax(-1) != y
            nll = -log_probs.gather(-1, y[..., None])[..., 0]
            common = {
                "kind": kind,
                "python": platform.python_version(),
                "accuracy": 1 - wrong.double().mean().item(),
                "perplexity": nll.mean().exp().item(),
                "ece": metrics.ece(log_probs.exp().flatten(0, 1), y.flatten()).item(),
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
                        **common,
                        "score": name,
                        "error_auroc": metrics.error_auroc(by_token.flatten(), wrong.flatten()).item()
                        if by_token is not None and mixed
                        else float("nan"),
                        "auroc": metrics.auroc(by_text[learned][name], values).item() if foreign else float("nan"),
                    }
                )
    return rows


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return, for each training text, a table of the predictions and one of the scores."""
    seeds = frame["seed"].nunique()
    versions = ", ".join(sorted(set(map(str, frame["python"]))))
    sections = [_section(frame[frame["learned"] == learned], learned) for learned in dict.fromkeys(frame["learned"])]
    networks = f"{seeds} network{'s' if seeds > 1 else ''}"
    return f"""Means and standard deviations of {networks} per row. The standard library is that of Python {versions}. The model is a GPT-2 with
{LAYERS} layers and {WIDTH} channels; each of {len(CHARACTERS)} characters is a token. Training takes {EPOCHS} passes over {PIECES:,} pieces of
{LENGTH} characters, {BATCH} per step. Every fifth module is held out. `sample` has {DRAWS} noisy passes, `vote` {VOTERS} voters.

*Docstrings*, *code*, *pages*: the kind of text that is predicted, held-out parts of {ASKED} pieces each; *pages* are those of this
documentation. *Right*: share of characters for which the most probable one is that of the text. *Wrong*: AUROC for detecting wrong next
characters in a kind of text, after the first {READ} characters of each piece. *Foreign*: AUROC for telling pieces of this kind from held-out
pieces of the learned kind, by the mean score over the characters of a piece; for total risk, this is the mean entropy of the tokens. Unlike
the other scores, *perplexity* uses the actual text.

{chr(10).join(sections)}"""


def _section(frame: pd.DataFrame, learned: str) -> str:
    import pandas as pd

    kinds = list(dict.fromkeys(frame["kind"]))
    groups = sorted(frame.groupby("method"), key=lambda named: list(WRAPPERS).index(str(named[0])))
    quality, detection = [], []
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
            detection.append(row)
    return f"""### learned from {learned}

{table(pd.DataFrame(quality))}

{table(pd.DataFrame(detection))}
"""


def _number(values: pd.Series, digits: int = 3) -> str:
    if values.isna().all():
        return ""
    spread = f" ± {values.std(ddof=0):.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{spread}"
