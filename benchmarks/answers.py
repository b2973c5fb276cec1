"""Addition, copying and look-ups by a small language model: which scores of a generated answer detect wrong answers, in and out of domain?

A one-layer decoder learns from text alone to add numbers of one or two digits, another one to look up a key in a table, and a two-layer decoder
to copy words. Each is tested on unseen prompts of the same kind and on prompts from outside its domain: longer numbers, words and tables,
letters that never occur in training, and keys that are missing from the table, for which it cannot know that there is no answer. For addition
and copying, size and epochs were set so that a network gets some held-out questions wrong. Look-ups are learned all at once or not at all; the
table is small enough that every network learns them. These settings were chosen after seeing scores of other trainings.
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
PROMPTS = 500  # per kind
SHADES = {"plain": "#555555", "sample": "#3E97CF", "vote": "#CC79A7"}


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each seed, task and method; cells of addition have no argument `task`, which keeps the keys of older results valid."""
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
        for method in (reversed(WRAPPERS) if not smoke else ("plain", "vote"))  # slowest first
    ]


def score_answers(wrapped: Any, task: Task, lines: list[Line], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return which greedy answers are wrong [n], and uncertainty scores of each answer, from its tokens and from sampled answers.

    Args:
        wrapped: wrapped decoder.
        task: task that it was trained on.
        lines: questions with their answers.
        seed: seed of the sampled answers.
    """
    questions, expected = map(list, zip(*lines, strict=True))
    options: dict[str, Any] = {"tokenizer": Characters(task.characters), "max_new_tokens": task.longest}
    greedy = text.generate(wrapped, questions, **options)
    wrong = torch.tensor([answer != target for answer, target in zip(greedy.texts or (), expected, strict=True)])
    scores = {
        "log-probability": -greedy.log_prob,
        "mean log-probability": -greedy.mean_log_prob,
        "mean entropy": greedy.mean_entropy,
        "max entropy": greedy.max_entropy,
    }
    if len(greedy.member_log_probs) > 1:
        scores["mean aleatoric"] = greedy.risk.aleatoric.nanmean(1)
        scores["mean epistemic"] = greedy.risk.epistemic.nanmean(1)
        scores["max epistemic"] = greedy.risk.epistemic.nan_to_num(0).amax(1)
        scores["perplexity spread"] = greedy.perplexity_spread
    drawn = text.generate(
        wrapped, questions, do_sample=True, top_k=0, num_return_sequences=ANSWERS, seed=seed, **options
    )
    scores["self-consistency"] = -torch.tensor(drawn.self_consistency())
    scores["semantic entropy"] = torch.tensor(drawn.semantic_entropy(task.same))
    scores["semantic entropy, discrete"] = torch.tensor(drawn.semantic_entropy(task.same, discrete=True))
    return wrong, scores


def run(method: str, seed: int, epochs: int, prompts: int, task: str = "addition") -> list[dict[str, Any]]:
    """Return one row for each score and kind of prompt, and for all kinds together."""
    wrapped = trained(method, seed, epochs, task)
    kinds = TASKS[task].lines(prompts)[1]
    by_kind = {kind: score_answers(wrapped, TASKS[task], lines, seed) for kind, lines in kinds.items()}
    in_domain = by_kind["held out"][1]
    by_kind["all"] = (
        torch.cat([wrong for wrong, _ in by_kind.values()]),
        {name: torch.cat([scores[name] for _, scores in by_kind.values()]) for name in in_domain},
    )
    results = []
    for kind, (wrong, scores) in by_kind.items():
        mixed = 0 < int(wrong.sum()) < len(wrong)
        foreign = kind not in ("held out", "all")
        for name, score in scores.items():
            results.append(
                {
                    "prompts_of": kind,
                    "score": name,
                    "accuracy": 1 - wrong.double().mean().item(),
                    "error_auroc": metrics.error_auroc(score, wrong).item() if mixed else float("nan"),
                    "auroc": metrics.auroc(in_domain[name], score).item() if foreign else float("nan"),
                }
            )
    return results


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return a figure of all tasks and, for each task, a table of accuracies and one of AUROCs."""
    if "task" not in frame:
        frame = frame.assign(task="addition")
    frame = frame.fillna({"task": "addition"})
    seeds = frame.groupby("task")["seed"].nunique()
    networks = (
        "Means of " + " or ".join(str(n) for n in sorted(set(seeds))) + (" networks" if seeds.max() > 1 else " network")
    )
    sections = [_section(frame[frame["task"] == task], task) for task in TASKS if task in set(frame["task"])]
    _picture(frame, pictures / "answers-wrong.png")
    return f"""{networks} per row. The model is a GPT-2 with {WIDTH} channels and one token per character, trained without dropout, which would
cost so small a network much of its accuracy. `sample` has {DRAWS} noisy passes, `vote` {VOTERS} voters. Answers are decoded greedily, and one
is right only if it equals the expected text exactly.

*Wrong*: AUROC for detecting wrong answers among the prompts of that kind, or among all kinds together; empty where all answers are wrong or all
are right. *Foreign*: AUROC for telling prompts of that kind from held-out ones, whether or not the answer is right. Scores are signed so that
higher means less trust: log-probability and self-consistency are negated. Self-consistency and semantic entropy use {ANSWERS} sampled answers
per prompt; two answers mean the same if they are the same number or text. *Discrete* gives each sampled answer the same weight.

![AUROC of wrong answers for each score and task](images/answers-wrong.png)

*Dots*: wrong answers among held-out prompts. *Crosses*: wrong answers among all kinds together, most of which are outside the domain. Each mark
is a mean, with a line from the lowest to the highest network. At .5 a score says nothing; below .5 it trusts wrong answers more than right ones.

{chr(10).join(sections)}"""


def _section(frame: pd.DataFrame, task: str) -> str:
    """Describe the kinds of prompts of a task and return its tables."""
    import pandas as pd

    kinds = list(dict.fromkeys(frame["prompts_of"]))
    accuracy_rows, auroc_rows = [], []
    for method, group in sorted(frame.groupby("method"), key=lambda pair: list(WRAPPERS).index(pair[0])):
        shares = group.groupby("prompts_of")["accuracy"].mean()
        accuracy_rows.append({"method": str(method), **{kind: f"{shares[kind]:.3f}" for kind in kinds}})
        for score, some in group.groupby("score", sort=False):
            means = some.groupby("prompts_of")[["error_auroc", "auroc"]].mean()
            row = {"method": str(method), "score": str(score)}
            row |= {f"wrong: {kind}": _number(means.loc[kind, "error_auroc"]) for kind in kinds}
            row |= {
                f"foreign: {kind}": _number(means.loc[kind, "auroc"])
                for kind in kinds
                if kind not in ("held out", "all")
            }
            auroc_rows.append(row)
    columns = [
        "method",
        "score",
        *(name for name in auroc_rows[0] if any(row[name] for row in auroc_rows) and ":" in name),
    ]
    n_train = len(TASKS[task].lines(1)[0])
    about = {
        "addition": f"""sums of two numbers from 0 to 99; one layer. *Held out*: other sums of such numbers.
*Unseen block*: both numbers from {BLOCK.start} to {BLOCK.stop - 1}, which are never added to each other in training. *Zero in front*: the first
number has a leading zero, as in 07+35. *Three digits*: both numbers have three digits.""",
        "copying": f"""words of 4 to 6 letters from an alphabet of {len(KNOWN)}; two layers. *Held out*: other such words.
*Two letters*: words with at most two different letters. *Unseen letter*: one letter is one of {len(UNSEEN)} that never occur in training.
*Longer*: words of 8 to 10 letters.""",
        "retrieval": f"""prompts, each a table that gives a digit for each of the keys {", ".join(KEYS)}, in this order, followed by the key
to look up; one layer. *Held out*: other such tables. *Other order*: the keys stand in another order. *Unseen key*: a letter that never occurs in
training replaces one of the keys and is looked up. *Longer table*: two more keys. *Key not there*: the key to look up is missing from the table,
which never happens in training, so that every answer but an empty one is wrong.""",
    }[task]
    return f"""### {task}

Trained in {EPOCHS[task]} passes over {n_train:,} {about}

Share of right answers, by kind of prompt:

{table(pd.DataFrame(accuracy_rows))}

AUROC of each score:

{table(pd.DataFrame(auroc_rows)[columns])}
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
                points = [(scores.index(str(score)), values.dropna()) for score, values in by_score]
                points = [(row, values) for row, values in points if len(values)]
                at = [row + 0.24 * (place - (len(methods) - 1) / 2) for row, _ in points]
                middle = [values.mean() for _, values in points]
                ax.hlines(
                    at, [v.min() for _, v in points], [v.max() for _, v in points], color=SHADES[method], linewidth=0.8
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
