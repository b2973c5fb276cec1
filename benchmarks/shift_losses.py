"""Risk control under image corruptions, for the benchmark `shift`: masks of road scenes, and several labels of pairs of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from camvid_models import VOID, scenes
from camvid_models import trained as segmenter
from ood_models import standardized
from ood_pairs_models import SHIFTS, seen, shifted, trained
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, fit, laplace, sample, vote
from workbench.calibration import adapt_batch_norm, control_risk, learn_then_test

LEVEL, CONFIDENCE = 0.1, 0.9
MODERATE = tuple((kind, severity) for kind, severity in SHIFTS if severity <= 3)
CAMERAS = ("none", 0), *MODERATE
SPLITS = 100  # random splits into held-out and evaluated images
THRESHOLDS = torch.linspace(0, 1, 201)
MASKS = ("plain", "vote last", "sample", "sculpt")
LABELS = ("plain", "vote", "sample", "laplace")
# losses and sizes, both [images, thresholds], by kind and severity of the shift
Losses = dict[tuple[str, int], tuple[Tensor, Tensor]]


def masks(method: str, epochs: int, rows: int) -> list[dict[str, Any]]:
    """Apply `control_risk` to CamVid: a class has the mask {p >= 1 - threshold}; the loss is the share of pixels missed by their mask."""
    net = segmenter(method, 0, epochs, rows)
    parts = scenes(rows)
    x, y = (torch.cat([parts[name][i] for name in ("validation", "test")]) for i in (0, 1))

    def losses(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        missed, sizes = [], []
        for image, classes in zip(images.split(16), y.split(16), strict=True):
            p = model(image).softmax(1)
            labelled = classes != VOID
            true_p = p.gather(1, classes.where(labelled, 0)[:, None])[:, 0]
            for scene_true_p, known, scene_p in zip(true_p, labelled, p, strict=True):
                missed.append(_below(scene_true_p[known]))
                sizes.append(len(scene_p) * (1 - _below(scene_p[:, known].flatten())))
        return torch.stack(missed), torch.stack(sizes)

    return _judged(net, x, losses, _controlled)


def _below(p: Tensor) -> Tensor:
    """Return the share of probabilities below 1 - threshold, for every threshold."""
    limits = (1 - THRESHOLDS).to(p)
    return torch.searchsorted(p.sort().values, limits).double() / len(p)


def labels(method: str, epochs: int, rows: int) -> list[dict[str, Any]]:
    """Apply `learn_then_test` to pairs of images with one or two of eight labels: the loss is the share of false labels among the predicted."""
    trunk: Any = nn.Sequential(*trained(0, epochs, rows))[:-1]
    x, y, x_test, y_test, _ = seen(0, rows)
    x, y = pairs(x[:20_000], y[:20_000])
    x_test, y_test = pairs(x_test[:2000], y_test[:2000])
    body: Any = compose()(trunk).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = _heads()[method](nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)))
    features = _features(body, standardized(x))
    fit(head, (features, y), epochs=2 if rows else 20, validation=0, standardize=False, seed=0, progress=False)

    def losses(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            p = head.eval()(_features(model, images)).sigmoid()
        labelled = p[:, None] >= 1 - THRESHOLDS[:, None]
        false = (labelled & ~y_test[:, None].bool()).sum(2) / labelled.sum(2).clamp_min(1)
        return false.double(), (labelled & y_test[:, None].bool()).sum(2) / y_test[:, None].sum(2)

    return _judged(body, x_test, losses, _tested, standardized)


def _heads() -> dict[str, Callable[[nn.Module], Any]]:
    return {
        "plain": compose(output="binary"),
        "vote": vote.Wrapper(5, output="binary"),
        "sample": sample.Wrapper(5, output="binary"),
        "laplace": laplace.Wrapper(output="binary"),
    }


def pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return pairs of images side by side, and which of the eight classes they show, float [n, 8]."""
    half = len(x) // 2
    seen_classes = F.one_hot(y[:half], 8) | F.one_hot(y[half : 2 * half], 8)
    return torch.cat([x[:half], x[half : 2 * half]], 3), seen_classes.float()


@torch.no_grad()
def _features(model: Any, images: Tensor) -> Tensor:
    return torch.cat([model(part) for part in images.split(500)])


def _controlled(losses: Tensor) -> int:
    """Return the index of the threshold that bounds the expected loss."""
    return int((control_risk(losses, THRESHOLDS, LEVEL) == THRESHOLDS).nonzero())


def _tested(losses: Tensor) -> int:
    """Return the index of the last threshold, from high probabilities downwards, whose loss is bounded with confidence."""
    # at index 0 no labels are predicted
    return max(len(learn_then_test(losses, THRESHOLDS, LEVEL, CONFIDENCE)) - 1, 0)


def _judged(
    model: Any,
    x: Tensor,
    losses: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    threshold: Callable[[Tensor], int],
    prepared: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[dict[str, Any]]:
    """Return one row for each way to calibrate and shift: the mean loss of images that are not held out, over random halves."""
    by_model: dict[str, Losses] = {"as trained": {}, "adapted": {}}
    with torch.no_grad():
        for camera in CAMERAS:
            images = prepared(x if camera[0] == "none" else shifted(x, *camera))
            for name, net in (("as trained", model), ("adapted", adapt_batch_norm(model, images, batch_size=250))):
                by_model[name][camera] = losses(net, images)
    orders = [torch.randperm(len(x), generator=torch.Generator().manual_seed(split)) for split in range(SPLITS)]
    results = []
    for camera in CAMERAS:
        others = [other for other in MODERATE if other[0] != camera[0]]
        for way, by, cameras in (
            ("split", "as trained", []),
            ("adapted", "adapted", []),
            ("other cameras held out", "as trained", others),
            ("adapted, other cameras", "adapted", others),
        ):
            known, (new, size) = by_model[by], by_model[by][camera]
            risks, sizes = [], []
            for order in orders:
                held, judged = order.chunk(2)
                parts = [known["none", 0][0][held]]
                # each held-out image enters once as it is and once under one of the other shifts: both kinds have the same weight
                parts += [known[other][0][held[i :: len(others)]] for i, other in enumerate(cameras)]
                at = threshold(torch.cat(parts))
                risks.append(new[judged, at].mean())
                sizes.append(size[judged, at].mean())
            over = torch.stack(risks)
            results.append(
                {
                    "method": way,
                    "kind": camera[0],
                    "severity": camera[1],
                    "loss": over.mean().item(),
                    "above": (over > LEVEL).double().mean().item(),
                    "size": torch.stack(sizes).mean().item(),
                }
            )
    return results
