"""Out-of-distribution scores on the same networks: eight classes of CIFAR-10 against the two left out, other data sets, and image corruptions.

The images are JPEG copies, so the numbers do not compare with published ones. For each seed, a network is trained with other classes left out.
Everything is fitted on training images alone. But the parts of `auto` and the outliers that it generates were chosen on two networks with other
seeds and other classes left out, against the same other sets and shifts; the networks reported here were not used for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ood_models import standardized
from ood_pairs_models import FAR, SHIFTS, far, seen, shifted, trained
from torch import Tensor

from workbench import metrics, neo
from workbench.experiments.bench import table
from workbench.methods.densities import DENSITIES, Density
from workbench.methods.made_outliers import make_outliers

if TYPE_CHECKING:
    import pandas as pd

WITHOUT = "auto without like shifts"
LIKE_SHIFTS = ("noisy", "smooth", "smoother", "zoomed", "faded", "flat")  # generated outliers that resemble the shifts
METHODS = (*(name for name in DENSITIES if name != "flow"), WITHOUT)
PAIRS = ("near", *FAR)


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each network."""
    return [
        {"seed": seed, "epochs": 1 if smoke else 8, "rows": 300 if smoke else 0} for seed in range(1 if smoke else 3)
    ]


def run(seed: int, epochs: int, rows: int) -> list[dict[str, Any]]:
    """Return one row for each score and set of out-of-distribution images."""
    net: Any = trained(seed, epochs, rows)
    x, y, x_test, y_test, unseen = seen(seed, rows)
    half = len(x_test) // 2
    usual, changed = x_test[:half][:3000], x_test[half:][:1000]
    strange = {"near": unseen, **{name: far(name, rows) for name in FAR}}
    strange |= {f"{kind} {severity}": shifted(changed, kind, severity) for kind, severity in SHIFTS}
    with torch.no_grad():
        accuracy = metrics.accuracy(net(standardized(x_test)).softmax(1), y_test).item()
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
        density.fit(*_inputs(density, known["train"]), y[::step] if density.uses_labels else None, head=head, **options)
        with torch.no_grad():
            risks = {name: density.eval()(*_inputs(density, rows)) for name, rows in known.items() if name != "train"}
        for name in strange:
            auroc = metrics.auroc(risks["usual"], risks[name]).item()
            fpr95 = metrics.fpr95(risks["usual"], risks[name]).item()
            results.append({"method": method, "accuracy": accuracy, "out": name, "auroc": auroc, "fpr95": fpr95})
    return results


def _outliers(x: Tensor) -> dict[str, Tensor]:
    """Return the outliers by kind that `wrapped.fit` generates for `auto` from batches of 125 images."""
    made: dict[str, list[Tensor]] = {}
    for seed, part in enumerate(x.split(125)):
        for kind, pixels in make_outliers(part, len(part), seed):
            made.setdefault(kind, []).append(pixels)
    return {kind: torch.cat(parts) for kind, parts in made.items()}


@torch.no_grad()
def _features(wrapped: Any, pixels: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the features of each layer that neo uses, and the logits; all scores share them."""
    (method,) = wrapped._workbench.methods
    batches = [method.features(wrapped, (part,), {}) for part in standardized(pixels).split(500)]
    return [torch.cat(layer) for layer in zip(*(features for _, _, features, _ in batches), strict=True)], torch.cat(
        [y for y, *_ in batches]
    )


def _inputs(density: Density, rows: tuple[list[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
    return (rows[0] if density.needs_features else []), rows[1]


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return a table with a line for each score and a column for each kind of out-of-distribution images."""
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
                "behind the best, mean": f"{behind.mean():.3f}",
                "behind the best, worst": f"{behind.max():.3f}",
                "behind by at most .01": f"{(behind <= 0.01).mean():.0%}",
            }
        )
    lines.sort(key=lambda line: line["mean"], reverse=True)
    names = [line["density"] for line in lines if line["density"] != WITHOUT]
    networks, accuracy = frame["seed"].nunique(), frame["accuracy"].mean()
    return f"""AUROC of each score, for images of each kind against test images of the eight known classes: means over {networks} networks, which
have an accuracy of {accuracy:.3f} on these classes. *Near*: the two classes left out, most of them similar to a known one (cat and dog, truck
and automobile, deer and horse). *Camvid*: road scenes. *Noise*, *blur*, *contrast*, *jpeg*: corruptions of known classes, means over
severities 1 to 5. *Mean*: over the kinds. *Behind the best*: by how much the AUROC is below that of the best single score on the same network
and images, over all {len(single)} pairs of a network and a set of images: mean, worst, and the share of pairs where it is at most .01; a
single score is any but `auto`. *{WITHOUT}*: `auto` without the generated outliers that are noisy, smooth, zoomed or faded, as the shifts here
are; outliers with a frame, which digits and clothes have here, are kept.

{table(pd.DataFrame(lines))}

Targets: `auto` should be the best score on average, where it is number {1 + names.index("auto")} of {len(names)}, and within .01 of the best
single score on every pair, which is missed. It is missed on near classes and road scenes, where one score is better than the mean of the two
that rank them and the alarms add noise, and on a few slight shifts. Which score is best on near classes differs between networks, and training
data do not reveal it: tests with classes left out of the densities and of the last layer favoured ReAct on both networks of the design, and it
was best on one of them. Where no generated outlier resembles a shift, above all for blur, `auto` is behind ASH and SCALE. The networks were
trained beforehand, in about five minutes each on one core."""
