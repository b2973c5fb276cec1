"""Risk control under bad cameras, for the benchmark `shift`: masks of road scenes, and several labels of pairs of pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from camvid_models import VOID, scenes
from camvid_models import trained as segmenter
from ood_models import standardised
from ood_pairs_models import SHIFTS, seen, shifted, trained
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, fit, laplace, sample, vote
from workbench.calibration import adapt_batch_norm, control_risk, learn_then_test

LEVEL, CONFIDENCE = 0.1, 0.9
MODERATE = tuple((kind, severity) for kind, severity in SHIFTS if severity <= 3)
CAMERAS = ("none", 0), *MODERATE
SPLITS = 100  # of the images into those held out and those judged
THRESHOLDS = torch.linspace(0, 1, 201)
MASKS = ("plain", "vote last", "sample", "sculpt")
LABELS = ("plain", "vote", "sample", "laplace")
Losses = dict[tuple[str, int], tuple[Tensor, Tensor]]  # by camera: losses and sizes, both [images, thresholds]


def masks(method: str, epochs: int, rows: int) -> list[dict[str, Any]]:
    """`control_risk` of CamVid: the mask of a class is {p >= 1 - threshold}, the loss of a scene the share of its pixels that theirs misses."""
    net = segmenter(method, 0, epochs, rows)
    parts = scenes(rows)
    x, y = (torch.cat([parts[name][i] for name in ("validation", "test")]) for i in (0, 1))

    def losses(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        missed, sizes = [], []
        for image, classes in zip(images.split(16), y.split(16), strict=True):
            p = model(image).softmax(1)
            counts = classes != VOID
            of_truth = p.gather(1, classes.where(counts, 0)[:, None])[:, 0]
            for each, known, all_classes in zip(of_truth, counts, p, strict=True):
                missed.append(_below(each[known]))
                sizes.append(len(all_classes) * (1 - _below(all_classes[:, known].flatten())))
        return torch.stack(missed), torch.stack(sizes)

    return _judged(net, x, losses, _controlled)


def _below(p: Tensor) -> Tensor:
    """The share of probabilities below 1 - threshold, for every threshold."""
    wanted = (1 - THRESHOLDS).to(p)
    return torch.searchsorted(p.sort().values, wanted).double() / len(p)


def labels(method: str, epochs: int, rows: int) -> list[dict[str, Any]]:
    """`learn_then_test` of pairs of pictures, each with several of eight labels: the loss is the share of false ones among those given."""
    trunk: Any = nn.Sequential(*trained(0, epochs, rows))[:-1]
    x, y, x_test, y_test, _ = seen(0, rows)
    x, y = pairs(x[:20_000], y[:20_000])
    x_test, y_test = pairs(x_test[:2000], y_test[:2000])
    body: Any = compose()(trunk).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = _heads()[method](nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)))
    features = _features(body, standardised(x))
    fit(head, (features, y), epochs=2 if rows else 20, validation=0, standardize=False, seed=0, progress=False)

    def losses(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            p = head.eval()(_features(model, images)).sigmoid()
        labelled = p[:, None] >= 1 - THRESHOLDS[:, None]
        false = (labelled & ~y_test[:, None].bool()).sum(2) / labelled.sum(2).clamp_min(1)
        return false.double(), (labelled & y_test[:, None].bool()).sum(2) / y_test[:, None].sum(2)

    return _judged(body, x_test, losses, _tested, standardised)


def _heads() -> dict[str, Callable[[nn.Module], Any]]:
    return {
        "plain": compose(output="binary"),
        "vote": vote.Wrapper(5, output="binary"),
        "sample": sample.Wrapper(5, output="binary"),
        "laplace": laplace.Wrapper(output="binary"),
    }


def pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two pictures side by side, and which of eight classes are seen, float [n, 8]."""
    half = len(x) // 2
    seen_classes = F.one_hot(y[:half], 8) | F.one_hot(y[half : 2 * half], 8)
    return torch.cat([x[:half], x[half : 2 * half]], 3), seen_classes.float()


@torch.no_grad()
def _features(model: Any, images: Tensor) -> Tensor:
    return torch.cat([model(part) for part in images.split(500)])


def _controlled(losses: Tensor) -> int:
    """The place of the threshold whose expected loss is bounded."""
    return int((control_risk(losses, THRESHOLDS, LEVEL) == THRESHOLDS).nonzero())


def _tested(losses: Tensor) -> int:
    """The place of the last of the thresholds that are good with confidence, from the top of the probabilities downwards."""
    # at place 0 nothing is given
    return max(len(learn_then_test(losses, THRESHOLDS, LEVEL, CONFIDENCE)) - 1, 0)


def _judged(
    model: Any,
    x: Tensor,
    losses: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    threshold: Callable[[Tensor], int],
    prepared: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[dict[str, Any]]:
    """One row for each way to calibrate and camera: the mean loss of images that were not held out, over random halves."""
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
                # an image counts as often as another, whatever it looks like
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
