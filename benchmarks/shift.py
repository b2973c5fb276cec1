"""Does conformal prediction stay valid under image corruptions? Sets of classes that aim at a coverage of 90 %, and bounds on losses.

The networks, images and corruptions are those of `ood_pairs`: eight classes of CIFAR-10, as JPEG copies. One half of the test images is held out
for calibration; the other half is evaluated, clean and under each shift. Ways to weight were compared beforehand on a network with other classes
left out, on 8,000 training images that it had not seen, under these corruptions and four others (single pixels, coarse pixels, motion,
darkness).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ood_models import standardized
from ood_pairs_models import SHIFTS, seen, shifted, trained
from shift_losses import CONFIDENCE, LABELS, LEVEL, MASKS, SPLITS, labels, masks
from torch import Tensor, nn

from workbench import compose, neo
from workbench.calibration import DensityRatio, adapt_batch_norm, calibrate
from workbench.errors import WorkbenchWarning
from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd

COVERAGE, N_CLASSES = 0.9, 8
KINDS = tuple(dict.fromkeys(kind for kind, _ in SHIFTS))
PER_SHIFT = 400  # held-out images per kind and severity of corruption, where other corruptions are held out as well
BINS = 10  # groups by vacuitic risk


class Known(nn.Module):
    """Precomputed rows [class scores, vacuitic risk, features] -> the class scores."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows[:, :N_CLASSES]


def strangeness(rows: Tensor) -> Tensor:
    return rows[:, N_CLASSES].contiguous()


def features(rows: Tensor) -> Tensor:
    return rows[:, N_CLASSES + 1 :]


def bins_of(held_out: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that groups rows by vacuitic risk, into groups with the same number of held-out rows."""
    edges = strangeness(held_out).quantile(torch.linspace(0, 1, BINS + 1)[1:-1])
    return lambda rows: torch.bucketize(strangeness(rows), edges)


def scored(rows: Tensor) -> Tensor:
    """Return class scores and features."""
    return torch.cat([rows[:, :N_CLASSES], features(rows)], 1)


def principal(rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a projection to the first 15 principal components of the features of these rows."""
    centre = features(rows).mean(0)
    directions = torch.linalg.svd(features(rows) - centre, full_matrices=False).Vh[:15].mT
    return lambda new: (features(new) - centre) @ directions


def known(wrapped: Any, images: Tensor) -> Tensor:
    """Return the rows that `Known` takes, computed from images."""
    parts, before_head = [], nn.Sequential(*wrapped.unwrap())[:-1]
    with torch.no_grad():
        for part in standardized(images).split(500):
            scores, risk = wrapped(part, return_risk=True)
            parts.append(torch.cat([scores, risk[:, None], before_head(part)], 1))
    return torch.cat(parts)


def warns(call: Callable[[], Any]) -> bool:
    """Return whether a call warns that rows are unlike those held out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return any("stranger by vacuitic risk" in str(warning.message) for warning in caught)


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for each network (sets of classes), and for each wrapper (several labels, masks)."""
    size = {"epochs": 1 if smoke else 8, "rows": 300 if smoke else 0}
    return [
        *({"seed": seed, **size} for seed in range(1 if smoke else 2)),
        *({"task": "labels", "wrapper": name, "seed": 0, **size} for name in (LABELS[:1] if smoke else LABELS)),
        *(
            {"task": "masks", "wrapper": name, "seed": 0, "epochs": 1 if smoke else 6, "rows": 24 if smoke else 0}
            for name in (MASKS[:1] if smoke else MASKS)
        ),
    ]


def run(seed: int, epochs: int, rows: int, task: str = "sets", wrapper: str = "neo") -> list[dict[str, Any]]:
    """Return one row for each method and set of images: coverage and mean size of the sets, or the loss to be bounded."""
    if task != "sets":
        return masks(wrapper, epochs, rows) if task == "masks" else labels(wrapper, epochs, rows)
    net = trained(seed, epochs, rows)
    x, y, x_test, y_test, _ = seen(seed, rows)
    wrapped: Any = neo.Wrapper(output="logits")(net).eval()
    wrapped.fit([(standardized(part), part_y) for part, part_y in zip(x.split(500), y.split(500), strict=True)])
    half = len(x_test) // 2
    held, y_held = x_test[:half], y_test[:half]
    rest, y_rest = x_test[half:], y_test[half:]
    spoilt = {
        (kind, severity): shifted(held[i::20][:PER_SHIFT], kind, severity) for i, (kind, severity) in enumerate(SHIFTS)
    }
    labels_of = {shift: y_held[i::20][:PER_SHIFT] for i, shift in enumerate(SHIFTS)}
    judged = {
        ("none", 0): rest,
        **{(kind, severity): shifted(rest[:1000], kind, severity) for kind, severity in SHIFTS},
    }

    def adapted(images: Tensor) -> Tensor:
        return known(adapt_batch_norm(wrapped, standardized(images), batch_size=500), images)

    asked = {name: (known(wrapped, images), adapted(images)) for name, images in judged.items()}
    asked_held = known(wrapped, held), adapted(held)
    asked_spoilt = {at: (known(wrapped, part), adapted(part)) for at, part in spoilt.items()}
    watched: Any = calibrate(wrapped, (standardized(held), y_held), "conformal", score="lac")
    results = []
    for (kind, severity), images in judged.items():
        told = warns(lambda images=images: watched.predict_set(standardized(images[:1000]), COVERAGE))
        truth = y_rest[: len(images)]
        others = [shift for shift in SHIFTS if shift[0] != kind]
        y_both = torch.cat([y_held, *(labels_of[shift] for shift in others)])
        (here, moved_here), (new, moved) = asked_held, asked[kind, severity]
        both, moved_both = (torch.cat([asked_held[i], *(asked_spoilt[shift][i] for shift in others)]) for i in range(2))
        for method, (rows_held, y_rows, rows_new, options) in {
            "split": (here, y_held, new, {}),
            "by class": (here, y_held, new, {"groups": "class"}),
            "weighted by features": (here, y_held, new, {"weight": DensityRatio(here, new, features)}),
            "weighted by neo": (here, y_held, new, {"weight": DensityRatio(here, new, strangeness)}),
            "weighted, squares": (here, y_held, new, {"weight": DensityRatio(here, new, scored, model="squares")}),
            "weighted, quadratic": (
                here,
                y_held,
                new,
                {"weight": DensityRatio(here, new, principal(here), model="quadratic")},
            ),
            "other cameras held out": (both, y_both, new, {}),
            "other cameras, by neo": (both, y_both, new, {"groups": bins_of(both)}),
            "adapted": (moved_here, y_held, moved, {}),
            "adapted, weighted by features": (
                moved_here,
                y_held,
                moved,
                {"weight": DensityRatio(moved_here, moved, features)},
            ),
            "adapted, weighted, squares": (
                moved_here,
                y_held,
                moved,
                {"weight": DensityRatio(moved_here, moved, scored, model="squares")},
            ),
            "adapted, weighted, quadratic": (
                moved_here,
                y_held,
                moved,
                {"weight": DensityRatio(moved_here, moved, principal(moved_here), model="quadratic")},
            ),
            "adapted, other cameras": (moved_both, y_both, moved, {}),
            "adapted, other cameras, weighted, quadratic": (
                moved_both,
                y_both,
                moved,
                {"weight": DensityRatio(moved_both, moved, principal(moved_both), model="quadratic")},
            ),
        }.items():
            calibrated: Any = calibrate(
                compose(output="logits")(Known()), (rows_held, y_rows), "conformal", score="lac", **options
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", WorkbenchWarning)  # sets of all classes are counted below
                sets = calibrated.predict_set(rows_new, COVERAGE)
            results.append(
                {
                    "method": method,
                    "kind": kind,
                    "severity": severity,
                    "coverage": sets.gather(1, truth[:, None]).double().mean().item(),
                    "size": sets.sum(1).double().mean().item(),
                    "told": told,
                }
            )
    return results


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return a table of sets of classes, and one of losses for labels and for masks."""
    tasks = frame.get("task", frame["method"].map(lambda _: None)).fillna("sets")
    losses = [_losses(frame[tasks == task], task) for task in ("labels", "masks") if (tasks == task).any()]
    return "\n\n".join([_sets(frame[tasks == "sets"]), *losses])


def _sets(frame: pd.DataFrame) -> str:
    """Return a table with a line for each method: coverage under each kind of shift, and sizes of sets."""
    import pandas as pd

    lines = []
    for method, group in frame.groupby("method", sort=False):
        clean, moderate = group[group["severity"] == 0], group[group["severity"].between(1, 3)]
        severe, sets = group[group["severity"] > 3], moderate.groupby(["kind", "severity"])["coverage"].mean()
        lines.append(
            {
                "method": method,
                "clean": f"{clean['coverage'].mean():.1%}",
                **{kind: f"{moderate[moderate['kind'] == kind]['coverage'].mean():.1%}" for kind in KINDS},
                "worst of 12": f"{sets.min():.1%}",
                f"at least {COVERAGE - 0.03:.0%}": f"{(moderate['coverage'] >= COVERAGE - 0.03).mean():.0%}",
                "within 3 %": f"{((moderate['coverage'] - COVERAGE).abs() <= 0.03 + 1e-9).mean():.0%}",
                "severe": f"{severe['coverage'].mean():.1%}",
                "size, clean": f"{clean['size'].mean():.2f}",
                "size, shifted": f"{moderate['size'].mean():.2f}",
            }
        )
    split = frame[(frame["method"] == "split") & (frame["severity"] > 0)]
    told = split["told"].astype(bool)
    lost, kept = told[split["coverage"] < COVERAGE - 0.03], told[split["coverage"] >= COVERAGE - 0.03]
    clean = frame[(frame["method"] == "split") & (frame["severity"] == 0)]
    networks = frame["seed"].nunique()
    whole = [line for line in lines if line["within 3 %"] == "100%"]
    named = ", ".join(f"*{line['method']}* ({line['clean']} of clean images)" for line in whole) or "none"
    return f"""Coverage of sets of classes that aim at {COVERAGE:.0%}: means over {networks} networks. *Clean*: images without a shift. *Noise*,
*blur*, *contrast*, *jpeg*: shifts of severity 1 to 3; *severe*: all shifts of severity 4 and 5. *Worst of 12*: the lowest coverage of a kind and
severity up to 3, averaged over networks. *At least {COVERAGE - 0.03:.0%}*: share of shifts up to severity 3 with that coverage; *within 3 %*:
share of shifts with at least that coverage and at most {COVERAGE + 0.03:.0%}. *Size*: mean number of classes in a set, for clean images and
under shifts up to severity 3. 1,000 images are evaluated under each shift, so that a coverage is known within 2 %.

{table(pd.DataFrame(lines))}

- *split*: calibrated on clean held-out images. *by class*: the same with `groups="class"`. *weighted*: with `weight=DensityRatio(...)`,
estimated from the same images that are evaluated, without their labels: from the last features, from vacuitic risk (*by neo*), by
`model="squares"` from features and class scores, or by `model="quadratic"` from the first 15 principal components of the features.
- *adapted*: `adapt_batch_norm` with the statistics of the held-out images for these, and of the evaluated images, without labels, for those.
- *other cameras held out* (*other cameras*): calibrated on the clean held-out images and on copies of them under the three kinds of shifts
that are not evaluated, with their labels (at most {PER_SHIFT} images per kind and severity). *by neo*: `groups=` by vacuitic risk, in {BINS}
groups of the same size, so that sets of clean images do not grow because of corrupted ones.
- **Warnings**: sets of a model with neo warn when the guarantee does not hold. The coverage of *split* fell below {COVERAGE - 0.03:.0%} under
  {len(lost)} shifts (both networks, all severities), and a warning was given for {lost.sum()} of them; also for {kept.sum()} of {len(kept)}
  other shifts, and for {int(clean["told"].astype(bool).sum())} of {len(clean)} sets of clean images.

Target: a coverage of 90 ± 1 % for clean images, and within 3 % under every shift up to severity 3. All shifts are within 3 % for: {named}.
On training images, before these test images were used, *adapted, weighted, squares* was best (every shift above 87 %) and *quadratic* second
(96 % of them), so neither order is settled. Adaptation and weights need unlabelled images of the new camera, here 1,000 at once, and are not
available for the first image that arrives."""


def _losses(frame: pd.DataFrame, task: str) -> str:
    """Return a table with a line for each wrapper and way to calibrate: the loss to be bounded."""
    import pandas as pd

    lines = []
    for (wrapper, method), group in frame.groupby(["wrapper", "method"], sort=False):
        clean, moderate = group[group["severity"] == 0], group[group["severity"] > 0]
        lines.append(
            {
                "wrapper": wrapper,
                "method": method,
                "clean": f"{clean['loss'].mean():.1%}",
                **{kind: f"{moderate[moderate['kind'] == kind]['loss'].mean():.1%}" for kind in KINDS},
                "worst of 12": f"{moderate['loss'].max():.1%}",
                f"at most {LEVEL + 0.03:.0%}": f"{(moderate['loss'] <= LEVEL + 0.03).mean():.0%}",
                "above, clean": f"{clean['above'].mean():.0%}",
                "size, clean": f"{clean['size'].mean():.2f}",
                "size, shifted": f"{moderate['size'].mean():.2f}",
            }
        )
    what = {
        "masks": f"""### Masks: `control_risk`

Loss: the share of a scene's pixels that the mask of their class misses, to be at most {LEVEL:.0%} on average. The validation and test scenes and
the network are those of `camvid`, with one network for each wrapper. *Size*: mean number of the nine masks that contain a pixel.""",
        "labels": f"""### Several labels: `learn_then_test`

Inputs are two images side by side, with eight labels of which one or two are true. Loss: the share of false labels among the predicted ones, to
be at most {LEVEL:.0%} on average, with a confidence of {CONFIDENCE:.0%} over the held-out rows. The model is a small head in each wrapper, on
the features of the first network. *Size*: share of the true labels that are predicted.""",
    }[task]
    return f"""{what}

Mean losses over {SPLITS} random splits into held-out and evaluated rows. *Clean*: without a shift; *noise*, *blur*, *contrast*, *jpeg*: under
shifts of severity 1 to 3; *worst of 12*: the highest loss of a kind and severity; *at most {LEVEL + 0.03:.0%}*: share of these shifts with
that loss. *Above*: share of splits whose mean loss is above the level of {LEVEL:.0%}. Columns *clean* and *shifted* are without a shift and
under these shifts.

{table(pd.DataFrame(lines))}"""
