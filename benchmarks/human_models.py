"""What the `human` benchmark is made of: images (copies as JPEG), people's answers, networks of others and of our own, features."""

from __future__ import annotations

import functools
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ood_models import train
from ood_pairs_models import pictures
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.atomic import replacing
from workbench.data.files import cache_folder, locate, read
from workbench.data.split_drawing import subset

IMAGES = "cifar10-jpeg"
NETWORKS = {
    "VGG-15-BN": "vgg_15_BN_64",
    "ResNet-110": "resnet_basic_110",
    "preact-164": "resnet_preact_bottleneck_164",
    "DenseNet-BC-100": "densenet_BC_100_12",
    "PyramidNet-110": "pyramidnet_basic_110_270",
    "WRN-28-10": "wrn_28_10",
    "ResNeXt-29": "resnext_29_8x64d",
    "Shake-Shake": "shake_shake_26_2x64d_SSI_cutout16",
}
LOGITS, WEIGHTS = "cifar10/published-test-logits.npz", "cifar10/resnet20.safetensors"
ANNOTATORS = ("random_label1", "random_label2", "random_label3")
MEAN, SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as the published ResNet-20 was trained with
RECIPE = {"lr": 0.05, "weight_decay": 5e-4}
EPOCHS = 4  # of the tuned trunk, 100 s each on a core with AVX-512 for bfloat16
OWN_RECIPE = {"lr": 0.15, "weight_decay": 1.5e-3}
OWN_EPOCHS = 10  # of networks from scratch


class Block(nn.Module):
    """Two 3x3 convolutions; the shortcut takes every second pixel and pads channels with zeros (option A of He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.missing = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        short = x[:, :, :: self.stride, :: self.stride]
        return F.relu(h + F.pad(short, (0, 0, 0, 0, self.missing // 2, self.missing // 2)))


class ResNet20(nn.Module):
    """The ResNet-20 of He et al. (2016) for images [n, 3, 32, 32]: 64 features and ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, 10)

    def features(self, x: Tensor) -> Tensor:
        """What enters the last layer [n, 64]."""
        h = F.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(h))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x))


class Stage(nn.Module):
    """Two 3x3 convolutions, the first one's output halved by max pooling; both start as copies of what enters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        for conv in (self.conv1, self.conv2):
            nn.init.dirac_(conv.weight.detach()[: conv.in_channels])

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.bn1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.bn2(self.conv2(h)))


class OwnNet(nn.Module):
    """A network that learns CIFAR-10 in few passes (Jordan 2024, arXiv:2404.00498): patches are whitened, three stages follow.

    Args:
        x: standardised images [n, 3, 32, 32], whose patches of 2x2 pixels are whitened by the first layer, which is not trained.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2, bias=False)
        patches = F.unfold(x, 2).mT.reshape(-1, 12).double()
        variances, directions = torch.linalg.eigh(patches.mT @ patches / len(patches))
        whitening = (directions / (variances + 5e-4).sqrt()).mT.reshape(12, 3, 2, 2).float()
        self.whiten.weight = nn.Parameter(torch.cat([whitening, -whitening]), requires_grad=False)
        self.stages = nn.Sequential(Stage(24, 64), Stage(64, 256), Stage(256, 256))
        self.linear = nn.Linear(256, 10, bias=False)

    def features(self, x: Tensor) -> Tensor:
        """What enters the last layer [n, 256]."""
        return F.max_pool2d(self.stages(F.gelu(self.whiten(x))), 3).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x)) / 9


@functools.cache
def answers(n: int) -> dict[str, Tensor]:
    """What is known of the images without looking at them; n of each part, 0 for all.

    Returns:
        Of training images "clean", the true classes [n], and "people", the share of three people that chose each class [n, 10]; of test
        images "truth" [m], "counts" of the some 50 people who chose each class [m, 10], and "judged", their rows. "both" is the mean of
        "clean" and "people".
    """
    people, train_files, test_files = read("cifar10n-jpeg")
    counts = np.load(io.BytesIO(read("cifar10h-jpeg")[-1]))
    kept, judged = (
        subset(
            IMAGES, option, n or None, len(files["labels"]), torch.from_numpy(files["labels"].astype(np.int64)), 10, 0
        )
        for option, files in (("n_train", train_files), ("n_test", test_files))
    )
    chosen = torch.from_numpy(np.stack([people[name] for name in ANNOTATORS], 1).astype(np.int64)[kept])
    clean, said = torch.from_numpy(people["clean_label"].astype(np.int64)[kept]), F.one_hot(chosen, 10).float().mean(1)
    return {
        "judged": torch.from_numpy(judged),
        "clean": clean,
        "people": said,
        "both": (F.one_hot(clean, 10) + said) / 2,
        "truth": torch.from_numpy(test_files["labels"].astype(np.int64)[judged]),
        "counts": torch.from_numpy(counts[judged]).double(),
    }


def parts(n: int) -> tuple[slice, slice]:
    """Training images that heads are trained on, the first half, and those held out from every training, the last tenth."""
    rows = n or 50_000
    return slice(0, rows // 2), slice(rows - rows // 10, rows)


def standardised(x: Tensor) -> Tensor:
    """Pixels [n, 3, 32, 32] in [0, 1] as the networks take them."""
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(SCALE)[:, None, None]


def published_logits(n: int) -> Tensor:
    """Logits [8, m, 10] of NETWORKS for the test images of `answers`, as they were published: without loss."""
    path = locate(LOGITS)
    assert path is not None, f"set WORKBENCH_DATA to a folder that holds {LOGITS}"
    with np.load(path) as stored:
        return torch.stack(
            [torch.from_numpy(stored[name])[answers(n)["judged"]].double() for name in NETWORKS.values()]
        )


def features(trunk: str, n: int) -> dict[str, Tensor]:
    """What enters the last layer of a ResNet-20; kept in the folder in WORKBENCH_BENCH_CACHE, else in the user cache.

    Args:
        trunk: "published", the weights of another's training on lossless images, or "tuned", those trained on here, and means over image
            and mirror image.
        n: How many images of each part; 0 for all.

    Returns:
        Features of images to train on ("train"), of those held out ("held"), and of test images ("test"), each [rows, 64].
    """
    path = _folder() / f"human-features-{trunk}-{n}.pt"
    if path.exists():
        found: dict[str, Tensor] = torch.load(path, weights_only=True)
        return found
    net, loaded = network(trunk, n), pictures(IMAGES, n)
    first, last = parts(n)
    images = {"train": loaded.train.x[first], "held": loaded.train.x[last], "test": loaded.test.x}
    found = {
        name: torch.cat([_seen(net, part, trunk == "tuned") for part in x.split(500)]) for name, x in images.items()
    }
    _keep(found, path)
    return found


@torch.no_grad()
def _seen(net: ResNet20, x: Tensor, mirrored: bool) -> Tensor:
    """Features [n, 64] of images, or their mean with those of the mirror images."""
    own = net.features(standardised(x))
    return (own + net.features(standardised(x.flip(-1)))) / 2 if mirrored else own


def network(trunk: str, n: int) -> ResNet20:
    """The published ResNet-20, or the one tuned on JPEG copies towards the mean of the true class and three people's answers."""
    from safetensors.torch import load_file

    net = ResNet20()
    path = _folder() / f"human-{trunk}-{EPOCHS}-{n}.pt"
    if trunk == "tuned" and path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
        return net.eval()
    weights = locate(WEIGHTS)
    assert weights is not None, f"set WORKBENCH_DATA to a folder that holds {WEIGHTS}"
    net.load_state_dict(load_file(weights))
    if trunk == "tuned":
        x, known = pictures(IMAGES, n).train.x, answers(n)
        rows = slice(0, parts(n)[1].start)
        train(net, standardised(x[rows]), known["both"][rows], 0, 1 if n else EPOCHS, **RECIPE)
        layout: Any = net
        layout.to(memory_format=torch.contiguous_format)
        _keep(net.state_dict(), path)
    return net.eval()


def own_predictions(labels: str, seed: int, n: int) -> dict[str, Tensor]:
    """What a network that was trained here from scratch says; kept as `features` are.

    Args:
        labels: what of `answers` it is trained towards, on all training images but the held-out ones.
        seed: of its weights, the order of rows and the augmentation.
        n: How many images of each part; 0 for all.

    Returns:
        Probabilities [rows, 10], means over image, mirror image and both shifted by a pixel either way, of images held out ("held") and of test
        images ("test"); what enters the last layer [rows, 256], likewise, of these ("held features", "test features") and of as many training
        images as are held out ("train features").
    """
    path = _folder() / f"human-own-{labels}-{OWN_EPOCHS}-{n}-{seed}.pt"
    if path.exists():
        kept: dict[str, Tensor] = torch.load(path, weights_only=True)
        return kept
    loaded, held = pictures(IMAGES, n), parts(n)[1]
    x = standardised(loaded.train.x)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = OwnNet(x[: min(5000, held.start)])
    train(net, x[: held.start], answers(n)[labels][: held.start].float(), seed, 1 if n else OWN_EPOCHS, **OWN_RECIPE)
    predictions = {}
    for name, part in {
        "train": x[: held.stop - held.start],
        "held": x[held],
        "test": standardised(loaded.test.x),
    }.items():
        probs, entering = zip(*(_of_views(net, rows) for rows in part.split(500)), strict=True)
        predictions |= {name: torch.cat(probs), f"{name} features": torch.cat(entering)}
    _keep(predictions, path)
    return predictions


@torch.no_grad()
def _of_views(net: OwnNet, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean probabilities [n, 10] and features [n, 256] over image, mirror image, and both shifted by a pixel either way."""
    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    views = [view for shift in (padded[..., :32, :32], x, padded[..., 2:, 2:]) for view in (shift, shift.flip(-1))]
    with torch.autocast("cpu", torch.bfloat16):
        entering = [net.features(view.contiguous(memory_format=torch.channels_last)).float() for view in views]
    probs = [(net.linear(rows) / 9).softmax(1) for rows in entering]
    return torch.stack(probs).mean(0), torch.stack(entering).mean(0)


def _folder() -> Path:
    return Path(os.environ.get("WORKBENCH_BENCH_CACHE") or cache_folder() / "benchmarks").expanduser()


def _keep(found: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        torch.save(found, unfinished)
