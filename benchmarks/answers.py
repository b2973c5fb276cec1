"""Sums, copies and look-ups by a small language model: which score of a generated answer tells the wrong ones, in and out of its domain?

A decoder of one layer learns from text to add numbers of one or two digits, without being told what a number is, another to look up a key in
a table, and one of two layers to copy words. Each is asked what it has not seen of the same kind, and what is outside its domain: longer
numbers, words and tables, letters that were never trained on, and keys that are not in the table, of which it cannot know that there is no
answer. Size and epochs of sums and copies are those with which a network gets some held-out questions wrong; look-ups are learned all at once or
not at all, and the table is so small that all networks learn them. Scores of other trainings had been seen by then.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from answers_tasks import (
    BLOCK,
    DRAWS,
    KEYS,
    KNOWN,
    TASKS,
    UNSEEN,
    VOTERS,
    WIDTH,
    WRAPPERS,
    Characters,
    Line,
    Task,
    trained,
)
from torch import Tensor

from workbench import metrics, text
from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd

ANSWERS, SEEDS = 10, 3
EPOCHS = {"addition": 30, "copying": 5, "retrieval": 15}
PROMPTS = 500  # of each kind
SHADES = {"plain": "#555555", "sample": "#3E97CF", "vote": "#CC79A7"}


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every seed, task and method; those of sums name no task, as before there were others."""
    return [
        {
            "method": method,
            "seed": seed,
            "epochs": 1 if smoke else EPOCHS[task],
            "prompts": 20 if smoke else PROMPTS,
            **({} if task == "addition" else {"task": task}),
        }
        for seed in range(1 if smoke else SEEDS)
        for task in TASKS
        for method in (reversed(WRAPPERS) if not smoke else ("plain", "vote"))  # what takes longest first
    ]


def answered(wrapped: Any, task: Task, asked: list[Line], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Which greedy answers are wrong [n], and scores of them, higher for less trust: of the tokens, and of samples.

    Args:
        wrapped: the decoder.
        task: what it was trained on.
        asked: questions with their answers.
        seed: of the samples.
    """
    questions, results = map(list, zip(*asked, strict=True))
    options: dict[str, Any] = {"tokenizer": Characters(task.characters), "max_new_tokens": task.longest}
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
    scores["semantic entropy"] = torch.tensor(drawn.semantic_entropy(task.same))
    scores["semantic entropy, discrete"] = torch.tensor(drawn.semantic_entropy(task.same, discrete=True))
    return wrong, scores


def run(method: str, seed: int, epochs: int, prompts: int, task: str = "addition") -> list[dict[str, Any]]:
    """One row for each score and kind of prompt, and of all kinds together."""
    wrapped = trained(method, seed, epochs, task)
    kinds = TASKS[task].lines(prompts)[1]
    found = {kind: answered(wrapped, TASKS[task], asked, seed) for kind, asked in kinds.items()}
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
    """A figure of all tasks, and of each a table of right answers and one of the scores."""
    if "task" not in frame:
        frame = frame.assign(task="addition")
    frame = frame.fillna({"task": "addition"})
    seeds = frame.groupby("task")["seed"].nunique()
    networks = (
        "Means of " + " or ".join(str(n) for n in sorted(set(seeds))) + (" networks" if seeds.max() > 1 else " network")
    )
    sections = [_section(frame[frame["task"] == task], task) for task in TASKS if task in set(frame["task"])]
    _picture(frame, pictures / "answers-wrong.png")
    return f"""{networks} a row. GPT-2 of {WIDTH} channels, a character a token, without dropout, which costs so small a network much of its
accuracy. `sample` has {DRAWS} noisy passes, `vote` {VOTERS} voters. An answer is right if it is the whole answer, and nothing behind it; greedy.

*Wrong*: AUROC of the wrong answers among those of a kind, or of all kinds together; none where all are wrong or right. *Foreign*: AUROC of
prompts of this kind against held-out ones, whatever the answer. Log-probabilities are negated, so that higher means less trust.
Self-consistency and semantic entropy are of {ANSWERS} answers drawn for each prompt, the same number or text being the same meaning; *discrete*
counts each answer alike.

![AUROC of wrong answers by each score, of each task](images/answers-wrong.png)

*Dots*: wrong answers among held-out questions. *Crosses*: among all kinds together, most of them outside the domain. Mean, and a line from the
lowest to the highest network; at .5 a score says nothing, below it trusts wrong answers more than right ones.

{chr(10).join(sections)}"""


def _section(frame: pd.DataFrame, task: str) -> str:
    """What the kinds of a task are, and its tables."""
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
    known = len(TASKS[task].lines(1)[0])
    about = {
        "addition": f"""sums of numbers from 0 to 99, one layer. *Held out*: other sums of such numbers.
*Unseen block*: both numbers from {BLOCK.start} to {BLOCK.stop - 1}, which never meet in training. *Zero in front*: 07+35.
*Three digits*: both numbers have three.""",
        "copying": f"""words of 4 to 6 of {len(KNOWN)} letters, two layers. *Held out*: other such words.
*Two letters*: words of no more than two different ones. *Unseen letter*: one of {len(UNSEEN)} letters that are never trained on is among them.
*Longer*: words of 8 to 10.""",
        "retrieval": f"""tables of the keys {", ".join(KEYS)} in this order, each with a digit, and a key, one layer.
*Held out*: other such tables. *Other order*: of the keys. *Unseen key*: a letter that is never trained on stands in the place of a key, and is
asked for. *Longer table*: of two more keys. *Key not there*: the table lacks the key that is asked for, as none in the training does, so that
all that is written is wrong, but for an empty answer.""",
    }[task]
    return f"""### {task}

{EPOCHS[task]} passes over {known:,} {about}

Share of right answers, by kind of prompt:

{table(pd.DataFrame(right))}

{table(pd.DataFrame(telling)[columns])}
"""


def _picture(frame: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if task in set(frame["task"])]
    scores = list(dict.fromkeys(name for method in WRAPPERS for name in frame[frame["method"] == method]["score"]))
    methods = [method for method in WRAPPERS if method in set(frame["method"])]
    figure = Figure(figsize=(3.4 * len(tasks) + 1.8, 0.36 * len(scores) + 1.5), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for task, ax in zip(tasks, panels, strict=True):
        ax.axvline(0.5, color="#999999", linewidth=0.8)
        for place, method in enumerate(methods):
            for kind, marker in (("held out", "o"), ("all", "x")):
                chosen = (frame["task"] == task) & (frame["method"] == method) & (frame["prompts_of"] == kind)
                by_score = frame[chosen].groupby("score")["error_auroc"]
                found = [(scores.index(str(score)), values.dropna()) for score, values in by_score]
                found = [(row, values) for row, values in found if len(values)]
                at = [row + 0.24 * (place - (len(methods) - 1) / 2) for row, _ in found]
                middle = [values.mean() for _, values in found]
                ax.hlines(
                    at, [v.min() for _, v in found], [v.max() for _, v in found], color=SHADES[method], linewidth=0.8
                )
                ax.plot(middle, at, marker, color=SHADES[method], markersize=4, label=method if marker == "o" else None)
        ax.set(title=task, xlim=(0, 1.02), xlabel="AUROC of wrong answers")
        ax.set_yticks(range(len(scores)), scores)
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(methods), frameon=False)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _number(value: float) -> str:
    return f"{value:.3f}" if value == value else ""
