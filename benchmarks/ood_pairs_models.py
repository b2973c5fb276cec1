"""Networks and images of the `ood_pairs` benchmark: CIFAR-10 (JPEG copies) without two classes, and out-of-distribution images."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from ood_models import RECIPES, ResNet8, standardized, train
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import data
from workbench.atomic import replacing
from workbench.data.files import cache_folder

# by seed: cat and truck; dog and automobile; deer and airplane; bird and frog; horse and ship
UNSEEN = {0: (3, 9), 1: (5, 1), 2: (4, 0), 8: (2, 6), 9: (7, 8)}
DESIGN = (8, 9)  # seeds of the networks that `auto` was designed on
SHIFTS = tuple((kind, severity) for kind in ("noise", "blur", "contrast", "jpeg") for severity in range(1, 6))
FAR = ("mnist", "fashion-mnist", "camvid")


@functools.cache
def pictures(name: str, n: int) -> data.Data:
    """Return a set of images by name, read once per process; n rows of each part, 0 for all."""
    return data.load(name, n_train=n, n_test=n) if n else data.load(name)


def seen(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return training images [n, 3, 32, 32] in [0, 1] and classes 0 to 7, the same for testing, and test images of the classes left out."""
    loaded = pictures("cifar10-jpeg", n)
    numbers = torch.full((10,), -1)
    kept = [c for c in range(10) if c not in UNSEEN[seed]]
    numbers[kept] = torch.arange(8)
    y, y_test = numbers[loaded.train.y], numbers[loaded.test.y]
    return loaded.train.x[y >= 0], y[y >= 0], loaded.test.x[y_test >= 0], y_test[y_test >= 0], loaded.test.x[y_test < 0]


def far(name: str, n: int) -> Tensor:
    """Return test images of another set as [n, 3, 32, 32] in [0, 1]: digits and clothes in a black frame, or downscaled squares of scenes."""
    x = pictures(name, 0 if name == "camvid" else n).test.x.float()[:2000]
    if name != "camvid":
        return F.pad(x.reshape(-1, 1, 28, 28), (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    side = min(x.shape[2:])
    squares = torch.cat([x[..., :side], x[..., -side:]])[: n or None]
    return F.interpolate(squares, size=(32, 32), mode="area")


def shifted(x: Tensor, kind: str, severity: int) -> Tensor:
    """Return corrupted images.

    Args:
        x: pixels [n, 3, height, width] in [0, 1].
        kind: "noise" (Gaussian, with a standard deviation of 0.04 per step of severity), "blur" (Gaussian, 0.4 pixels per step), "contrast"
            (reduced to a share of 0.75, 0.75^2, ...) or "jpeg" (quality 30, 22, 16, 12 and 8).
        severity: 1 to 5.
    """
    if kind == "noise":
        return (x + 0.04 * severity * torch.randn(x.shape, generator=torch.Generator().manual_seed(severity))).clamp(
            0, 1
        )
    if kind == "contrast":
        mean = x.mean((1, 2, 3), keepdim=True)
        return mean + 0.75**severity * (x - mean)
    if kind == "jpeg":
        return torch.stack([_recoded(image, (30, 22, 16, 12, 8)[severity - 1]) for image in x])
    line = torch.exp(-0.5 * (torch.arange(-5.0, 6.0) / (0.4 * severity)) ** 2)
    line = (line / line.sum()).expand(3, 1, 1, 11)
    padded = F.pad(x, (5, 5, 5, 5), mode="reflect")
    return F.conv2d(F.conv2d(padded, line, groups=3), line.mT, groups=3)


def _recoded(image: Tensor, quality: int) -> Tensor:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray((255 * image).round().byte().permute(1, 2, 0).numpy()).save(file, "jpeg", quality=quality)
    with Image.open(file) as decoded:
        return (
            torch.frombuffer(bytearray(decoded.tobytes()), dtype=torch.uint8)
            .reshape(*image.shape[1:], 3)
            .permute(2, 0, 1)
            / 255
        )


def trained(seed: int, epochs: int, n: int) -> nn.Module:
    """Return a trained ResNet for eight classes, cached in the folder WORKBENCH_BENCH_CACHE or in the user cache."""
    folder = Path(os.environ.get("WORKBENCH_BENCH_CACHE") or cache_folder() / "benchmarks").expanduser()
    path = folder / f"ood-pairs-{epochs}-{n}-{seed}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net: Any = ResNet8(channels=3, classes=8)
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
        return net.eval()
    x, y, *_ = seen(seed, n)
    train(net, standardized(x), y, seed, epochs, **RECIPES["resnet8"])
    net.to(memory_format=torch.contiguous_format)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        torch.save(net.state_dict(), unfinished)
    return net
