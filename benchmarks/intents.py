"""Intents of sentences (CLINC150): what each risk says of wrong answers, and of sentences that have none of the 150 intents.

Two small networks, a bag of embeddings and a transformer, know words from the 15,000 training sentences alone. Out of scope are the 1,000 test
sentences of that name; those for training and validation were used for nothing. Settings were chosen by the likelihood of validation sentences
with an intent, on another seed; wrappers and scores are as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from intents_models import DRAWS, LENGTH, NETWORKS, RECIPES, VOTERS, sentences, trained
from torch import Tensor

from workbench import metrics, neo
from workbench.calibration.scaling import fit_temperature
from workbench.data.texts import PADDING, UNKNOWN
from workbench.experiments.bench import table
from workbench.methods.densities import DENSITIES

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("plain", "sculpt", "sample", "laplace", "swag", "snapshot", "vote last", "vote rank1", "vote")
SCORES = tuple(name for name in DENSITIES if name != "flow")
SEEDS = 3
Answers = tuple[Tensor, dict[str, Tensor]]  # class scores [n, classes], and by the names of risks one number a row


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every seed, network and method."""
    return [
        {
            "network": network,
            "method": method,
            "seed": seed,
            "epochs": 1 if smoke else int(RECIPES[network]["epochs"]),
            "rows": 500 if smoke else 0,
        }
        for seed in range(1 if smoke else SEEDS)
        for network in (NETWORKS if not smoke else ("bag",))
        for method in (METHODS if not smoke else ("plain", "vote"))
    ]


def run(network: str, method: str, seed: int, epochs: int, rows: int) -> list[dict[str, Any]]:
    """One row for each risk: of the wrapper, and with "plain" of every score on the same network."""
    wrapped = trained(network, method, seed, epochs, rows)
    parts = sentences(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        held, usual, strange = (
            _everywhere(_ask(wrapped), parts[part][0]) for part in ("validation", "test", "strange")
        )
        known = {name: (risk, strange[1][name]) for name, risk in usual[1].items()}
        if method == "plain":
            known["unknown words"] = _unknown_words(parts["test"][0]), _unknown_words(parts["strange"][0])
            for score in SCORES:
                known[score] = _by_density(wrapped.unwrap(), score, parts)
    scores, y = usual[0], parts["test"][1]
    temperature = float(fit_temperature(held[0], parts["validation"][1]))
    probs, calm = scores.softmax(1), (scores / temperature).softmax(1)
    wrong = scores.argmax(1) != y
    same = {
        "accuracy": metrics.accuracy(scores, y).item(),
        "nll": metrics.categorical_nll(probs, y).item(),
        "ece": metrics.ece(probs, y).item(),
        "temperature": temperature,
        "nll_tempered": metrics.categorical_nll(calm, y).item(),
        "ece_tempered": metrics.ece(calm, y).item(),
    }
    return [
        {
            **same,
            "risk": name,
            "error_auroc": metrics.error_auroc(inside, wrong).item(),
            "auroc": metrics.auroc(inside, outside).item(),
            "aupr": metrics.aupr(inside, outside).item(),
            "fpr95": metrics.fpr95(inside, outside).item(),
        }
        for name, (inside, outside) in known.items()
    ]


def _ask(wrapped: Any) -> Callable[[Tensor], Answers]:
    """What gives class scores and risks of sentences; of voters the disagreement as well as the evidence."""
    methods = [method.name for method in wrapped._workbench.methods]

    def ask(x: Tensor) -> Answers:
        if not methods:
            scores = wrapped(x)
            return scores, {"total": torch.special.entr(scores.softmax(1)).sum(1)}
        scores, risk = wrapped(x, return_risk=True)
        risks = {name: risk[name] for name in risk.names()}
        if "epistemic" not in risks:  # whose total is the aleatoric risk
            return scores, {"aleatoric": risk.aleatoric}
        if getattr(wrapped._workbench.methods[0], "design", None) is None:
            return scores, risks
        of_voters = torch.stack([voter(x).softmax(1) for voter in wrapped.voters()])
        total, aleatoric = (torch.special.entr(probs).sum(-1) for probs in (of_voters.mean(0), of_voters))
        plain = {"total": total, "aleatoric": aleatoric.mean(0), "epistemic": total - aleatoric.mean(0)}
        return scores, {**plain, "epistemic by design": risk.epistemic, "total by design": risk.total}

    return ask


def _by_density(net: Any, score: str, parts: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Vacuitic risk by one of neo's densities, of test sentences and of those out of scope."""
    wrapped: Any = neo.Wrapper(density=score, output="logits")(net).eval()
    x, y = parts["train"]
    wrapped.fit([*zip(x.split(500), y.split(500), strict=True)])

    def ask(x: Tensor) -> Answers:
        scores, risk = wrapped(x, return_risk=True)
        return scores, {"vacuitic": risk}

    usual, strange = (_everywhere(ask, parts[part][0])[1]["vacuitic"] for part in ("test", "strange"))
    return usual, strange


def _unknown_words(x: Tensor) -> Tensor:
    """The share of words [n] that are in no training sentence: what can be had without a network."""
    return (x == UNKNOWN).sum(1) / (x != PADDING).sum(1).clamp_min(1)


@torch.no_grad()
def _everywhere(ask: Callable[[Tensor], Answers], x: Tensor) -> Answers:
    scores, risks = zip(*(ask(batch) for batch in x.split(500)), strict=True)
    return torch.cat(scores), {name: torch.cat([some[name] for some in risks]) for name in risks[0]}


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """A table of the predictions, one of the wrappers' risks and one of the scores on the plain network."""
    quality = {
        "accuracy": ("accuracy", 3),
        "nll": ("NLL", 3),
        "ece": ("ECE", 3),
        "nll_tempered": ("NLL, tempered", 3),
        "ece_tempered": ("ECE, tempered", 3),
    }
    telling = {
        "error_auroc": ("errors, AUROC", 3),
        "auroc": ("out of scope, AUROC", 3),
        "aupr": ("AUPR", 3),
        "fpr95": ("FPR95", 3),
    }
    alone = frame["risk"].isin([*SCORES, "unknown words"])
    seeds = ", ".join(
        f"{count} of the {name}" for name, count in frame.groupby("network", sort=False)["seed"].nunique().items()
    )
    said = _table(frame[~alone].drop_duplicates(["network", "method", "seed"]), ["network", "method"], quality)
    text = f"""Means and standard deviations over seeds: {seeds}. Sentences are cut at {LENGTH} words. `plain` is one network, `vote` has
{VOTERS} voters (whole ones, rank-one factors on shared weights, or the last two layers), `swag` and `snapshot` have {VOTERS} sets of weights,
`sample` and `laplace` {DRAWS} draws; all with the same number of passes over the sentences. *Tempered*: after division of the scores by
the temperature that the validation sentences chose; they also chose the epoch.

{said}

*Errors*: chance that a wrong answer to a test sentence with an intent has a higher risk than a right one. *Out of scope*: chance that a sentence
without an intent has a higher risk than one that has one; *AUPR* with those out of scope as positives, {1000 / 5500:.2f} by chance;
*FPR95*: share of sentences with an intent that are flagged where 95 % of those out of scope are. *By design*: of the same voters with
`evidence="design"`, shaped by the validation sentences.

{_table(frame[~alone], ["network", "method", "risk"], telling)}"""
    if not alone.any():
        return text
    return f"""{text}

Scores on the plain network: neo's densities, fitted on the training sentences and their intents. *Unknown words*: the share of words that no
training sentence has, without a network. Numbers of words give `auto` no outliers to learn from; it is the mean of eight scores here.

{_table(frame[alone], ["network", "risk"], telling, by="auroc")}

Published for a pretrained BERT, which nothing here is: out-of-scope AUROC .942, for an ensemble of ten .958, for SNGP .969
(uncertainty-baselines)."""


def _table(frame: pd.DataFrame, keys: list[str], columns: dict[str, tuple[str, int]], by: str = "") -> str:
    """Means over seeds with their spread, within each network in the order of the frame or the best of a column first."""
    import pandas as pd

    groups = list(frame.groupby(keys, sort=False))
    order = list(dict.fromkeys(frame["network"]))
    groups.sort(key=lambda found: (order.index(found[0][0]), -found[1][by].mean() if by else 0))
    rows = []
    for key, group in groups:
        row = dict(zip(keys, map(str, key), strict=True))
        for name, (label, digits) in columns.items():
            spread = f" ± {group[name].std(ddof=0):.{digits}f}" if len(group) > 1 else ""
            row[label] = f"{group[name].mean():.{digits}f}{spread}"
        rows.append(row)
    return table(pd.DataFrame(rows))
