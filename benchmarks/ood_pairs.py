"""Every score of strangeness on the same networks: eight classes of CIFAR-10 against the two left out, other sets, and bad cameras.

The images are copies as JPEG, so no number here stands beside a published one. A network of eight classes is trained for each seed, with other
classes left out. Everything is fitted on training images alone. But what `auto` is made of, and which outliers it makes, was chosen on two
networks with other seeds and other classes left out, against the same other sets and shifts; those reported here had no part in that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ood_models import standardised
from ood_pairs_models import FAR, SHIFTS, far, seen, shifted, trained
from torch import Tensor

from workbench import metrics, neo
from workbench.experiments.bench import table
from workbench.methods.densities import DENSITIES, Density
from workbench.methods.made_outliers import make_outliers

if TYPE_CHECKING:
    import pandas as pd

WITHOUT = "auto without like shifts"
LIKE_SHIFTS = ("noisy", "smooth", "smoother", "zoomed", "faded", "flat")  # of the outliers that `auto` makes
METHODS = (*(name for name in DENSITIES if name != "flow"), WITHOUT)
PAIRS = ("near", *FAR)


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Every network."""
    return [
        {"seed": seed, "epochs": 1 if smoke else 8, "rows": 300 if smoke else 0} for seed in range(1 if smoke else 3)
    ]


def run(seed: int, epochs: int, rows: int) -> list[dict[str, Any]]:
    """One row for each score and set of strange images."""
    net: Any = trained(seed, epochs, rows)
    x, y, x_test, y_test, unseen = seen(seed, rows)
    half = len(x_test) // 2
    usual, changed = x_test[:half][:3000], x_test[half:][:1000]
    strange = {"near": unseen, **{name: far(name, rows) for name in FAR}}
    strange |= {f"{kind} {severity}": shifted(changed, kind, severity) for kind, severity in SHIFTS}
    with torch.no_grad():
        accuracy = metrics.accuracy(net(standardised(x_test)).softmax(1), y_test).item()
    seen_by: Any = neo.Wrapper(output="logits")(net).eval()
    step = max(1, len(x) // 20_000)  # as many rows as `wrapped.fit` looks at
    known = {
        name: _features(seen_by, pixels) for name, pixels in (("train", x[::step]), ("usual", usual), *strange.items())
    }
    made = {kind: _features(seen_by, pixels) for kind, pixels in _outliers(x[:: max(1, len(x) // 500)][:500]).items()}
    head = net.head.weight.detach(), net.head.bias.detach()
    results = []
    for method in METHODS:
        density = DENSITIES["auto" if method == WITHOUT else method]()
        outliers = [rows for kind, rows in made.items() if method != WITHOUT or kind not in LIKE_SHIFTS]
        options: dict[str, Any] = {"outliers": outliers} if density.takes_outliers else {}
        density.fit(*_asked(density, known["train"]), y[::step] if density.uses_labels else None, head=head, **options)
        with torch.no_grad():
            risks = {name: density.eval()(*_asked(density, rows)) for name, rows in known.items() if name != "train"}
        for name in strange:
            auroc = metrics.auroc(risks["usual"], risks[name]).item()
            fpr95 = metrics.fpr95(risks["usual"], risks[name]).item()
            results.append({"method": method, "accuracy": accuracy, "out": name, "auroc": auroc, "fpr95": fpr95})
    return results


def _outliers(x: Tensor) -> dict[str, Tensor]:
    """By kind what `wrapped.fit` makes for `auto` of batches of 125."""
    made: dict[str, list[Tensor]] = {}
    for seed, part in enumerate(x.split(125)):
        for kind, pixels in make_outliers(part, len(part), seed):
            made.setdefault(kind, []).append(pixels)
    return {kind: torch.cat(parts) for kind, parts in made.items()}


@torch.no_grad()
def _features(wrapped: Any, pixels: Tensor) -> tuple[list[Tensor], Tensor]:
    """What enters the layers that neo looks at, and the logits: once for all scores."""
    (method,) = wrapped._workbench.methods
    found = [method.features(wrapped, (part,), {}) for part in standardised(pixels).split(500)]
    return [torch.cat(layer) for layer in zip(*(features for _, _, features, _ in found), strict=True)], torch.cat(
        [y for y, *_ in found]
    )


def _asked(density: Density, rows: tuple[list[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
    return (rows[0] if density.needs_features else []), rows[1]


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """One table: a line for each score, a column for each kind of strange images."""
    import pandas as pd

    frame = frame.assign(kind=[name.split()[0] for name in frame["out"]])
    single = frame[~frame["method"].isin(["auto", WITHOUT])].groupby(["seed", "out"])["auroc"].max()
    lines = []
    for method, group in frame.groupby("method", sort=False):
        kinds = group.groupby("kind", sort=False)["auroc"].mean()
        behind = single.loc[list(zip(group["seed"], group["out"], strict=True))].to_numpy() - group["auroc"]
        lines.append(
            {
                "density": str(method),
                **{str(kind): f"{value:.3f}" for kind, value in kinds.items()},
                "mean": f"{kinds.mean():.4f}",
                "behind the best single, mean": f"{behind.mean():.3f}",
                "worst": f"{behind.max():.3f}",
                "within .01": f"{(behind <= 0.01).mean():.0%}",
            }
        )
    lines.sort(key=lambda line: line["mean"], reverse=True)
    names = [line["density"] for line in lines if line["density"] != WITHOUT]
    networks, accuracy = frame["seed"].nunique(), frame["accuracy"].mean()
    return f"""AUROC, means over {networks} networks (accuracy {accuracy:.3f} on their eight classes) and, of shifts, over severities 1 to 5;
*mean* over the kinds. *Behind the best single*: how far the AUROC lies below that of the best other score on the same network and images, over
all {len(single)} pairs, and the share of them where it is at most .01. *near* are the two classes left out, most of them look-alikes of one
that is known (cat and dog, truck and automobile, deer and horse), *camvid* road scenes. *{WITHOUT}*: learned without the made-up outliers
that are noisy, smooth, zoomed or faded, as the shifts here are; pictures in a frame, as digits and clothes have one here, are among the others.

{table(pd.DataFrame(lines))}

Aimed at: `auto` first on average, where it is number {1 + names.index("auto")} of {len(names)}, and within .01 of the best single score
on every pair, which is missed: on near classes and road scenes, where one score is better than the mean of the two that rank them and the alarms
add noise, and on a few slight shifts. Which score is best on near classes differs from network to network, and training data don't tell:
classes left out of the densities and of the last layer spoke for ReAct on both networks of the design, and it was best on one. Where nothing
made-up is like a shift, blur above all, `auto` is behind ASH and SCALE. The networks were trained beforehand, some five
minutes each on a quiet core."""
