"""Intent classification (CLINC150): how well does each risk detect wrong answers, and sentences with none of the 150 intents?

Two small networks, a bag of embeddings and a transformer, learn words from the 15,000 training sentences alone. Sentences without an intent are
the 1,000 out-of-scope test sentences of the set; its out-of-scope training and validation sentences are not used. Settings were chosen by the
likelihood of validation sentences with an intent, with another seed; wrappers and scores have their defaults.
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
Answers = tuple[Tensor, dict[str, Tensor]]  # class scores [n, classes], and risks [n] by name


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each seed, network and method."""
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
    """Return one row for each risk of the wrapper and, for "plain", for every score on the same network."""
    wrapped = trained(network, method, seed, epochs, rows)
    parts = sentences(rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        validation, in_scope, out_of_scope = (
            _in_batches(_predictor(wrapped), parts[part][0]) for part in ("validation", "test", "strange")
        )
        risks = {name: (risk, out_of_scope[1][name]) for name, risk in in_scope[1].items()}
        if method == "plain":
            risks["unknown words"] = _unknown_words(parts["test"][0]), _unknown_words(parts["strange"][0])
            for score in SCORES:
                risks[score] = _by_density(wrapped.unwrap(), score, parts)
    scores, y = in_scope[0], parts["test"][1]
    temperature = float(fit_temperature(validation[0], parts["validation"][1]))
    probs, tempered = scores.softmax(1), (scores / temperature).softmax(1)
    wrong = scores.argmax(1) != y
    common = {
        "accuracy": metrics.accuracy(scores, y).item(),
        "nll": metrics.categorical_nll(probs, y).item(),
        "ece": metrics.ece(probs, y).item(),
        "temperature": temperature,
        "nll_tempered": metrics.categorical_nll(tempered, y).item(),
        "ece_tempered": metrics.ece(tempered, y).item(),
    }
    return [
        {
            **common,
            "risk": name,
            "error_auroc": metrics.error_auroc(inside, wrong).item(),
            "auroc": metrics.auroc(inside, outside).item(),
            "aupr": metrics.aupr(inside, outside).item(),
            "fpr95": metrics.fpr95(inside, outside).item(),
        }
        for name, (inside, outside) in risks.items()
    ]


def _predictor(wrapped: Any) -> Callable[[Tensor], Answers]:
    """Return a function from sentences to class scores and risks; voters have risks both by disagreement and by evidence."""
    methods = [method.name for method in wrapped._workbench.methods]

    def predict(x: Tensor) -> Answers:
        if not methods:
            scores = wrapped(x)
            return scores, {"total": torch.special.entr(scores.softmax(1)).sum(1)}
        scores, risk = wrapped(x, return_risk=True)
        risks = {name: risk[name] for name in risk.names()}
        if "epistemic" not in risks:  # the total risk is the aleatoric one
            return scores, {"aleatoric": risk.aleatoric}
        if getattr(wrapped._workbench.methods[0], "design", None) is None:
            return scores, risks
        voter_probs = torch.stack([voter(x).softmax(1) for voter in wrapped.voters()])
        total, aleatoric = (torch.special.entr(probs).sum(-1) for probs in (voter_probs.mean(0), voter_probs))
        plain = {"total": total, "aleatoric": aleatoric.mean(0), "epistemic": total - aleatoric.mean(0)}
        return scores, {**plain, "epistemic by design": risk.epistemic, "total by design": risk.total}

    return predict


def _by_density(net: Any, score: str, parts: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return vacuitic risk by one of neo's densities for test sentences and for those out of scope."""
    wrapped: Any = neo.Wrapper(density=score, output="logits")(net).eval()
    x, y = parts["train"]
    wrapped.fit([*zip(x.split(500), y.split(500), strict=True)])

    def predict(x: Tensor) -> Answers:
        scores, risk = wrapped(x, return_risk=True)
        return scores, {"vacuitic": risk}

    in_scope, out_of_scope = (_in_batches(predict, parts[part][0])[1]["vacuitic"] for part in ("test", "strange"))
    return in_scope, out_of_scope


def _unknown_words(x: Tensor) -> Tensor:
    """Return the share of words [n] that occur in no training sentence: a baseline without a network."""
    return (x == UNKNOWN).sum(1) / (x != PADDING).sum(1).clamp_min(1)


@torch.no_grad()
def _in_batches(predict: Callable[[Tensor], Answers], x: Tensor) -> Answers:
    scores, risks = zip(*(predict(batch) for batch in x.split(500)), strict=True)
    return torch.cat(scores), {name: torch.cat([batch[name] for batch in risks]) for name in risks[0]}


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return a table of the predictions, one of the wrappers' risks and one of the scores on the plain network."""
    quality = {
        "accuracy": ("accuracy", 3),
        "nll": ("NLL", 3),
        "ece": ("ECE", 3),
        "nll_tempered": ("NLL, tempered", 3),
        "ece_tempered": ("ECE, tempered", 3),
    }
    detection = {
        "error_auroc": ("errors, AUROC", 3),
        "auroc": ("out of scope, AUROC", 3),
        "aupr": ("AUPR", 3),
        "fpr95": ("FPR95", 3),
    }
    is_score = frame["risk"].isin([*SCORES, "unknown words"])
    seeds = ", ".join(
        f"{count} of the {name}" for name, count in frame.groupby("network", sort=False)["seed"].nunique().items()
    )
    predictions = _table(
        frame[~is_score].drop_duplicates(["network", "method", "seed"]), ["network", "method"], quality
    )
    text = f"""Means and standard deviations over seeds: {seeds}. Sentences are cut at {LENGTH} words. `plain` is one network. `vote` has
{VOTERS} voters: whole networks, *rank1* factors on shared weights, or separate *last* two layers. `swag` and `snapshot` have {VOTERS} sets of
weights, `sample` and `laplace` take {DRAWS} draws. All have the same number of passes over the sentences. *Tempered*: scores divided by a
temperature fitted on the validation sentences, which also chose the epoch.

{predictions}

*Errors*: AUROC for detecting wrong answers to test sentences with an intent. *Out of scope*: AUROC for detecting sentences without an intent.
*AUPR*: area under the precision-recall curve, with out-of-scope sentences as positives; {1000 / 5500:.2f} by chance. *FPR95*: share of sentences
with an intent that are flagged at the threshold that flags 95 % of those out of scope. *By design*: risks of the same voters with
`evidence="design"`, shaped by the validation sentences.

{_table(frame[~is_score], ["network", "method", "risk"], detection)}"""
    if not is_score.any():
        return text
    return f"""{text}

Scores on the plain network: neo's densities, fitted on the training sentences and their intents. *Unknown words*: the share of words that occur
in no training sentence, a baseline without a network. `auto` cannot make outliers from word indices to learn from, and here is the mean of eight
scores.

{_table(frame[is_score], ["network", "risk"], detection, by="auroc")}

Published out-of-scope AUROCs (uncertainty-baselines), all with a pretrained BERT, while the networks here are small and not pretrained: a single
BERT .942, an ensemble of ten .958, SNGP .969."""


def _table(frame: pd.DataFrame, keys: list[str], columns: dict[str, tuple[str, int]], by: str = "") -> str:
    """Return a table of means over seeds with standard deviations, by network, in the frame's order or sorted by a column, best first."""
    import pandas as pd

    groups = list(frame.groupby(keys, sort=False))
    order = list(dict.fromkeys(frame["network"]))
    groups.sort(key=lambda pair: (order.index(pair[0][0]), -pair[1][by].mean() if by else 0))
    rows = []
    for key, group in groups:
        row = dict(zip(keys, map(str, key), strict=True))
        for name, (label, digits) in columns.items():
            spread = f" ± {group[name].std(ddof=0):.{digits}f}" if len(group) > 1 else ""
            row[label] = f"{group[name].mean():.{digits}f}{spread}"
        rows.append(row)
    return table(pd.DataFrame(rows))
