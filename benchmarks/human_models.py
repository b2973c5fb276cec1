"""Images (JPEG copies), people's answers, published networks and own ones, and features of the `human` benchmark."""

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
# pixel statistics that the published ResNet-20 was trained with
MEAN, SCALE = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)
RECIPE = {"lr": 0.05, "weight_decay": 5e-4}
EPOCHS = 4  # epochs of the tuned trunk, 100 s each on a core with AVX-512 for bfloat16
OWN_RECIPE = {"lr": 0.15, "weight_decay": 1.5e-3}
OWN_EPOCHS = 10  # epochs of networks from scratch


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
        """Return the inputs of the last layer [n, 64]."""
        h = F.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(h))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x))


class Stage(nn.Module):
    """Two 3x3 convolutions, with max pooling after the first one; both are initialized to copy their inputs."""

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
    """A network that learns CIFAR-10 in few passes (Jordan 2024, arXiv:2404.00498): a fixed whitening layer and three stages.

    Args:
        x: standardized images [n, 3, 32, 32]; the first layer, which is not trained, whitens their patches of 2x2 pixels.
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
        """Return the inputs of the last layer [n, 256]."""
        return F.max_pool2d(self.stages(F.gelu(self.whiten(x))), 3).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x)) / 9


@functools.cache
def answers(n: int) -> dict[str, Tensor]:
    """Return the labels of the images; n of each part, 0 for all.

    Returns:
        For training images: "clean", the true classes [n]; "people", the share of three people who chose each class [n, 10]; and "both", the
        mean of "clean" and "people" [n, 10]. For test images: "truth", the true classes [m]; "counts", how many of about 50 people chose each
        class [m, 10]; and "judged", the indices of the images [m].
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
    clean, shares = (
        torch.from_numpy(people["clean_label"].astype(np.int64)[kept]),
        F.one_hot(chosen, 10).float().mean(1),
    )
    return {
        "judged": torch.from_numpy(judged),
        "clean": clean,
        "people": shares,
        "both": (F.one_hot(clean, 10) + shares) / 2,
        "truth": torch.from_numpy(test_files["labels"].astype(np.int64)[judged]),
        "counts": torch.from_numpy(counts[judged]).double(),
    }


def parts(n: int) -> tuple[slice, slice]:
    """Return the training images of the heads, the first half, and those held out from every training, the last tenth."""
    rows = n or 50_000
    return slice(0, rows // 2), slice(rows - rows // 10, rows)


def standardized(x: Tensor) -> Tensor:
    """Return pixels [n, 3, 32, 32] in [0, 1] standardized for the networks."""
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(SCALE)[:, None, None]


def published_logits(n: int) -> Tensor:
    """Return the published logits [8, m, 10] of NETWORKS for the test images of `answers`, made from lossless images."""
    path = locate(LOGITS)
    assert path is not None, f"set WORKBENCH_DATA to a folder that holds {LOGITS}"
    with np.load(path) as stored:
        return torch.stack(
            [torch.from_numpy(stored[name])[answers(n)["judged"]].double() for name in NETWORKS.values()]
        )


def features(trunk: str, n: int) -> dict[str, Tensor]:
    """Return the last features of a ResNet-20, cached in the folder WORKBENCH_BENCH_CACHE or in the user cache.

    Args:
        trunk: "published", with the published weights, trained on lossless images, or "tuned", trained further here, with features that are
            means over the image and its mirror image.
        n: number of images of each part; 0 for all.

    Returns:
        Features [rows, 64] of training images ("train"), held-out training images ("held"), and test images ("test").
    """
    path = _folder() / f"human-features-{trunk}-{n}.pt"
    if path.exists():
        cached: dict[str, Tensor] = torch.load(path, weights_only=True)
        return cached
    net, loaded = network(trunk, n), pictures(IMAGES, n)
    first, last = parts(n)
    images = {"train": loaded.train.x[first], "held": loaded.train.x[last], "test": loaded.test.x}
    result = {
        name: torch.cat([_views(net, part, trunk == "tuned") for part in x.split(500)]) for name, x in images.items()
    }
    _save(result, path)
    return result


@torch.no_grad()
def _views(net: ResNet20, x: Tensor, mirrored: bool) -> Tensor:
    """Return features [n, 64] of images, or their mean with those of the mirror images."""
    plain = net.features(standardized(x))
    return (plain + net.features(standardized(x.flip(-1)))) / 2 if mirrored else plain


def network(trunk: str, n: int) -> ResNet20:
    """Return the published ResNet-20, or the one tuned on JPEG copies, with the mean of the true class and three people's answers as labels."""
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
        train(net, standardized(x[rows]), known["both"][rows], 0, 1 if n else EPOCHS, **RECIPE)
        layout: Any = net
        layout.to(memory_format=torch.contiguous_format)
        _save(net.state_dict(), path)
    return net.eval()


def own_predictions(labels: str, seed: int, n: int) -> dict[str, Tensor]:
    """Return predictions and features of a network trained here from scratch, cached like `features`.

    Args:
        labels: labels of `answers` that it is trained with, on all training images except the held-out ones.
        seed: seed of its weights, the order of rows and the augmentation.
        n: number of images of each part; 0 for all.

    Returns:
        Probabilities [rows, 10] of training images ("train", as many as are held out), held-out images ("held") and test images ("test"), and
        last features [rows, 256] ("train features", "held features", "test features"); all are means over the image, its mirror image, and
        both shifted by one pixel either way.
    """
    path = _folder() / f"human-own-{labels}-{OWN_EPOCHS}-{n}-{seed}.pt"
    if path.exists():
        cached: dict[str, Tensor] = torch.load(path, weights_only=True)
        return cached
    loaded, held = pictures(IMAGES, n), parts(n)[1]
    x = standardized(loaded.train.x)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = OwnNet(x[: min(5000, held.start)])
    train(net, x[: held.start], answers(n)[labels][: held.start].float(), seed, 1 if n else OWN_EPOCHS, **OWN_RECIPE)
    predictions = {}
    for name, part in {
        "train": x[: held.stop - held.start],
        "held": x[held],
        "test": standardized(loaded.test.x),
    }.items():
        probs, entering = zip(*(_of_views(net, rows) for rows in part.split(500)), strict=True)
        predictions |= {name: torch.cat(probs), f"{name} features": torch.cat(entering)}
    _save(predictions, path)
    return predictions


@torch.no_grad()
def _of_views(net: OwnNet, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean probabilities [n, 10] and features [n, 256] over the image, its mirror image, and both shifted by one pixel either way."""
    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    views = [view for shift in (padded[..., :32, :32], x, padded[..., 2:, 2:]) for view in (shift, shift.flip(-1))]
    with torch.autocast("cpu", torch.bfloat16):
        entering = [net.features(view.contiguous(memory_format=torch.channels_last)).float() for view in views]
    probs = [(net.linear(rows) / 9).softmax(1) for rows in entering]
    return torch.stack(probs).mean(0), torch.stack(entering).mean(0)


def _folder() -> Path:
    return Path(os.environ.get("WORKBENCH_BENCH_CACHE") or cache_folder() / "benchmarks").expanduser()


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        torch.save(tensors, unfinished)
