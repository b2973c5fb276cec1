"""Out-of-distribution detection for images of clothes (Fashion-MNIST): against digits (MNIST) and against corrupted images of clothes.

Each method gives an image an out-of-distribution score. Networks, temperatures and densities are fitted on the training images of clothes alone;
no test image, digit or corrupted image is used before it is scored. But neo's default was designed on this very pair: a few dozen variants
(parts, scales, numbers of components, layers) were compared by their AUROC against MNIST, on the LeNet-5 with seed 1 and the ResNet with seed 0,
which are also reported here, so that its score there is optimistic. LeNet-5 seeds 0 and 2 and the corrupted images were not used for that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ood_models import VOTERS, corrupted, images, rows_of, standardized, trained
from speed_clock import cost_in_passes
from torch import Tensor, nn

from workbench import metrics, neo
from workbench.calibration.scaling import fit_temperature
from workbench.experiments.bench import table
from workbench.methods.densities import DENSITIES

if TYPE_CHECKING:
    import pandas as pd

EPOCHS = {"lenet5": 20, "resnet8": 25}
SEEDS = {"lenet5": 3, "resnet8": 3}
SINGLE = ("max_softmax", "energy", "max_logit", "knn", "classwise", "gaussian", "flow", "signature")
VOTE = ("vote entropy", "vote information")
ENSEMBLE = ("ensemble entropy", "ensemble information")
CORRUPTIONS = tuple((kind, severity) for kind in ("noise", "blur", "contrast") for severity in (1, 3, 5))
BATCHES = (128, 1000)  # batch sizes at which the cost is measured
# images -> log-scores [n, classes] and out-of-distribution scores [n]
Predict = Callable[[Tensor], tuple[Tensor, Tensor]]


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each network, seed and method; an ensemble has the networks of all seeds."""
    rows = 500 if smoke else 0
    result = [
        {"model": model, "method": method, "seed": seed, "epochs": 1 if smoke else EPOCHS[model], "rows": rows}
        for model in EPOCHS
        for seed in range(1 if smoke else SEEDS[model])
        for method in (*SINGLE, *VOTE, *(ENSEMBLE if seed == 0 else ()))
    ]
    return [cell for cell in result if not smoke or cell["model"] == "lenet5"]


def run(model: str, method: str, seed: int, epochs: int, rows: int) -> list[dict[str, Any]]:
    """Return one row for each set of out-of-distribution images."""
    clothes, kept, calibration = rows_of(rows)
    x, y = standardized(clothes.train.x), clothes.train.y
    seeds = range(SEEDS[model]) if method in ENSEMBLE else [seed]
    nets = [trained(model, s, epochs, rows) for s in seeds]
    if method in ENSEMBLE:
        predict = _ensemble(nets, method)
    elif method in VOTE:
        predict = _vote(trained(model, seed, epochs, rows, voting=True), method)
    else:
        predict = _single(nets[0], method, x[kept])
    scores, _ = predict(x[calibration])
    temperature = float(fit_temperature(scores, y[calibration]))
    strange = {"mnist": images("mnist", rows).test.x}
    strange |= {f"{kind} {n}": corrupted(clothes.test.x, kind, n) for kind, n in CORRUPTIONS}
    scores, risk_in = predict(standardized(clothes.test.x))
    probs, tempered = scores.softmax(1), (scores / temperature).softmax(1)
    y = clothes.test.y
    common = {
        "accuracy": metrics.accuracy(probs, y).item(),
        "nll": metrics.categorical_nll(probs, y).item(),
        "ece": metrics.ece(probs, y).item(),
        "temperature": temperature,
        "nll_tempered": metrics.categorical_nll(tempered, y).item(),
        "ece_tempered": metrics.ece(tempered, y).item(),
        "parameters": sum(p.numel() for net in nets for p in net.parameters()),
        **{f"cost_{n}": cost_in_passes(nets[0], predict, x[:n], 2 if rows else 25) for n in BATCHES},
    }
    results = []
    for name, pixels in strange.items():
        answer, risk = predict(standardized(pixels))
        results.append(
            {
                **common,
                "out": name,
                "auroc": metrics.auroc(risk_in, risk).item(),
                "aupr": metrics.aupr(risk_in, risk).item(),
                "fpr95": metrics.fpr95(risk_in, risk).item(),
                "accuracy_out": float("nan") if name == "mnist" else metrics.accuracy(answer.softmax(1), y).item(),
            }
        )
    return results


def _single(net: nn.Module, method: str, x: Tensor) -> Predict:
    if method in DENSITIES:
        wrapped: Any = neo.Wrapper(density=method, output="logits")(net).eval()
        wrapped.fit(x)
        return _in_parts(lambda part: wrapped(part, return_risk=True))

    def softmax(batch: Tensor) -> tuple[Tensor, Tensor]:
        scores = net(batch)
        return scores, 1 - scores.softmax(1).amax(1)

    return _in_parts(softmax)


def _vote(wrapped: Any, method: str) -> Predict:
    """Score by voters on a shared trunk: entropy of their mean probability, or mutual information."""

    def predict(batch: Tensor) -> tuple[Tensor, Tensor]:
        scores, risk = wrapped(batch, return_risk=True)
        return scores, risk.total if method == "vote entropy" else risk.epistemic

    return _in_parts(predict)


def _ensemble(nets: list[nn.Module], method: str) -> Predict:
    """Score by several networks: entropy of their mean probability, or mutual information (Lakshminarayanan et al. 2017)."""

    def predict(batch: Tensor) -> tuple[Tensor, Tensor]:
        probs = torch.stack([net(batch) for net in nets]).softmax(2)
        mean = probs.mean(0)
        entropy = torch.special.entr(mean).sum(1)
        if method == "ensemble information":
            entropy = entropy - torch.special.entr(probs).sum(2).mean(0)
        return mean.clamp_min(1e-30).log(), entropy

    return _in_parts(predict)


def _in_parts(predict: Predict) -> Predict:
    @torch.no_grad()
    def all_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        scores, risks = zip(*(predict(batch) for batch in x.split(1000)), strict=True)
        return torch.cat(scores), torch.cat(risks)

    return all_rows


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return a table of the networks, one of the methods, and a figure of the corruptions."""
    _draw(frame, pictures / "ood-corruptions.png")
    mnist = frame[frame["out"] == "mnist"]
    plain = mnist[mnist["method"].isin(["max_softmax", VOTE[0], ENSEMBLE[0]])]
    percent = plain.assign(accuracy=100 * plain["accuracy"])
    names = {"max_softmax": "single", VOTE[0]: "vote", ENSEMBLE[0]: "ensemble"}
    voters = ", ".join(f"{model}: {n} of the last {k} layers" for model, (n, k) in VOTERS.items())
    quality = {
        "accuracy": ("accuracy (%)", 2),
        "nll": ("NLL", 4),
        "ece": ("ECE", 4),
        "nll_tempered": ("NLL, tempered", 4),
        "ece_tempered": ("ECE, tempered", 4),
    }
    detection = {
        "auroc": ("AUROC", 4),
        "aupr": ("AUPR", 4),
        "fpr95": ("FPR95", 4),
        "cost_128": ("cost at 128", 2),
        "cost_1000": ("cost at 1000", 2),
    }
    return f"""Means and standard deviations over {frame["seed"].nunique()} seeds; there is one ensemble, of as many networks.

Quality on the test images of clothes. *Tempered*: logits divided by a temperature fitted on 2,500 held-out training rows. Published for LeNet-5
(uncertainty-baselines): a single network has an accuracy of 91.0 % and an NLL of 0.321; an ensemble of ten has 93.2 %, 0.200 and an ECE of
0.010.

{_table(percent.assign(method=percent["method"].replace(names)), quality)}

Detection of digits among clothes. *AUROC*: probability that a digit has a higher score than a piece of clothing. *AUPR*: area under the
precision-recall curve, with digits as positives. *FPR95*: share of clothes that are flagged at the threshold that flags 95 % of the digits.
*Cost*: processor time of prediction and score at batch sizes of 128 and 1000, relative to a pass of the plain network. `signature` is neo's
default; `classwise` is DDU (Mukhoti et al. 2023), `knn` Sun et al. 2022, `energy` Liu et al. 2020, `max_logit` Hendrycks et al. 2022. `vote`
has voters on a shared trunk ({voters}); *entropy* is that of the mean probability, *information* the mutual information.

neo's default was designed on this very pair: a few dozen variants were compared by their AUROC against MNIST, on LeNet-5 with seed 1 and the
ResNet with seed 0, so its score there is optimistic. LeNet-5 seeds 0 and 2 and the corrupted images were not used for that.

{_table(mnist, detection)}

Detection of corrupted clothes among clothes:

![AUROC over the severity of noise, blur and loss of contrast, a line for each method](images/ood-corruptions.png)

Targets that were missed:

- An NLL of 0.180 for a single ResNet. Three recipes were compared on validation rows (see `ood_models.py`).
- A cost of at most 1.1 passes for neo's score: missed at 128 rows, where the fixed time of a call (finding the layers, five projections) counts,
  and with LeNet-5 at any batch size, because its passes are short.
- Voters on a shared trunk that are clearly better than one network at no more than 1.3 passes. With a shared trunk they differ too little; an
  ensemble of whole networks is better, and takes as many passes as it has networks."""


def _table(frame: pd.DataFrame, columns: dict[str, tuple[str, int]]) -> str:
    import pandas as pd

    rows = []
    for (model, method), group in frame.groupby(["model", "method"], sort=False):
        row = {"method": str(method), "network": str(model)}
        for name, (label, digits) in columns.items():
            spread = f" ± {group[name].std():.{digits}f}" if len(group) > 1 else ""
            row[label] = f"{group[name].mean():.{digits}f}{spread}"
        rows.append(row)
    return table(pd.DataFrame(rows))


def _draw(frame: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    models, kinds = list(dict.fromkeys(frame["model"])), list(dict.fromkeys(kind for kind, _ in CORRUPTIONS))
    figure = Figure(figsize=(9, 2.6 * len(models)), layout="constrained", facecolor="white")
    axes = figure.subplots(len(models), len(kinds), sharex=True, sharey=True, squeeze=False)
    shown = ("max_softmax", "energy", "knn", "classwise", "signature", ENSEMBLE[0])
    for i, model in enumerate(models):
        for j, kind in enumerate(kinds):
            ax = axes[i, j]
            for k, method in enumerate(shown):
                rows = frame[(frame["model"] == model) & (frame["method"] == method)]
                steps = [n for name, n in CORRUPTIONS if name == kind]
                means = [rows.loc[rows["out"] == f"{kind} {n}", "auroc"].mean() for n in steps]
                ax.plot(steps, means, marker="osD^vP"[k], label=method, color=_COLOURS[k])
            ax.set_title(f"{model}, {kind}")
            ax.axhline(0.5, color="#999999", linewidth=0.8)
            ax.set_ylim(0.4, 1.02)
    for ax in axes[-1]:
        ax.set_xlabel("severity (steps)")
    for row in axes:
        row[0].set_ylabel("AUROC")
    axes[0, -1].legend(fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})


_COLOURS = ("#999999", "#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#0072B2")
