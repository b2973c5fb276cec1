"""Network, scenes and training of the `camvid` benchmark."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from workbench import compose, data, fit, sample, sculpt, vote
from workbench.data.targets import VOID
from workbench.distributions import LogitNormal
from workbench.outputs import Logits

UNKNOWN = ("pedestrian", "bicyclist")
WIDTHS = (16, 32, 64, 96)  # channels at a quarter, an eighth, a sixteenth and a thirty-second of 240 x 180
FIRST = 8  # channels at a half
VOTERS = 4
LAST = 2  # layers per voter on top of the shared trunk
CLASSES = Logits(dim=1)
MEAN, SCALE = 0.42, 0.30  # mean and standard deviation of the training pixels
BATCH, LEARNING_RATE = 8, 0.01
CROP = 120, 160  # height and width of a training crop
# every n-th frame: scenes come from few drives, and neighbours are alike
STRIDES = {
    "train": 1,
    "validation": 2,
    "test": 3,
}
# images [n, 3, 180, 240]; known classes or VOID, and whether of an unknown class [n, 180, 240]
Scenes = tuple[Tensor, Tensor, Tensor]


class UNet(nn.Module):
    """A small U-Net (Ronneberger et al. 2015) with additive skips: images [n, 3, h, w] -> class scores [n, classes, h, w].

    Its finest skip has a quarter of the image's resolution. It computes in bfloat16 in training mode.

    Args:
        classes: number of classes.
    """

    def __init__(self, classes: int = 9) -> None:
        super().__init__()
        steps = list(itertools.pairwise(WIDTHS))
        self.stem = nn.Sequential(_block(3, FIRST, stride=2), _block(FIRST, WIDTHS[0], stride=2))
        self.down = nn.ModuleList(nn.Sequential(_block(a, b, stride=2), _block(b, b)) for a, b in steps)
        self.narrow = nn.ModuleList(nn.Conv2d(b, a, 1) for a, b in reversed(steps))
        self.up = nn.ModuleList(_block(a, a) for a, _ in reversed(steps))
        self.head = nn.Conv2d(WIDTHS[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.training):
            maps = [self.stem((x - MEAN) / SCALE)]
            for down in self.down:
                maps.append(down(maps[-1]))
            h = maps.pop()
            for narrow, up in zip(self.narrow, self.up, strict=True):
                skip = maps.pop()
                h = up(skip + F.interpolate(narrow(h), size=skip.shape[-2:], mode="bilinear"))
            return F.interpolate(self.head(h).to(x.dtype), size=x.shape[-2:], mode="bilinear")


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


@functools.cache
def scenes(n: int) -> dict[str, Scenes]:
    """Return training, validation and test scenes at the stored size of 240 x 180.

    Args:
        n: number of scenes per part, before frames are skipped; 0 for all.

    Returns:
        All training scenes, every second validation scene and every third test scene.
    """
    rows = data.load("camvid", **({"n_train": n, "n_test": n} if n else {}))
    unknown = torch.tensor([rows.classes.index(name) for name in UNKNOWN])
    kept = [label for label in range(len(rows.classes)) if label not in unknown]
    number = torch.full((len(rows.classes) + 1,), VOID)  # the last entry stands for void
    number[kept] = torch.arange(len(kept))
    parts = {"train": rows.train, "validation": rows.parts["validation"], "test": rows.test}
    result = {}
    for name, part in parts.items():
        frames = slice(0, n or None, STRIDES[name])
        y = part.y[frames]
        result[name] = part.x[frames], number[y.where(y != VOID, -1)], torch.isin(y, unknown)
    return result


@functools.cache
def trained(kind: str, seed: int, epochs: int, n: int) -> Any:
    """Return a wrapped network in evaluation mode, trained on the known classes in crops, half of them mirrored.

    Args:
        kind: "plain", "vote last", "vote rank1", "vote whole", "sample" or "sculpt".
        seed: seed of weights, order, crops and mirroring.
        epochs: passes over the scenes.
        n: number of scenes; 0 for all.
    """
    x, y, _ = scenes(n)["train"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = _wrapper(kind)(UNet().to(memory_format=torch.channels_last))
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True, collate_fn=_augmented, drop_last=len(x) > BATCH)
    fit(
        wrapped,
        loader,
        epochs=epochs,
        criterion=F.cross_entropy if kind == "plain" else None,
        lr=LEARNING_RATE,
        validation=0,
        standardize=False,
        seed=seed,
        progress=False,
    )
    return wrapped.eval()


def _wrapper(kind: str) -> Any:
    shares = {"vote last": LAST, "vote rank1": "rank1", "vote whole": None}
    if kind in shares:
        return vote.Wrapper(VOTERS, share=shares[kind], output=CLASSES)
    if kind == "sample":
        return sample.Wrapper(n_samples=VOTERS, output=CLASSES)
    return sculpt.Wrapper(LogitNormal, output=CLASSES) if kind == "sculpt" else compose()


def _augmented(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate a batch: take the same random crop of all its scenes and mirror each with a chance of one half, labels like images."""
    x, y = (torch.stack(part) for part in zip(*rows, strict=True))
    mirrored = torch.rand(len(x)) < 0.5
    x[mirrored], y[mirrored] = x[mirrored].flip(-1), y[mirrored].flip(-1)
    top, left = (int(torch.randint(size - crop + 1, ())) for size, crop in zip(y.shape[1:], CROP, strict=True))
    window = ..., slice(top, top + CROP[0]), slice(left, left + CROP[1])
    return x[window].contiguous(memory_format=torch.channels_last), y[window]
