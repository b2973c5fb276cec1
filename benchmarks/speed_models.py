"""Models of the speed benchmark: plain modules with random weights, made of `entry` (the first layer), `body`, and `head` (the last layer)."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 1000  # vocabulary of the language models on the CPU
OUTPUTS = 10
MAP_CLASSES = 19


def build(name: str, large: bool = False) -> nn.Sequential:
    """Return a model with reproducible random weights.

    Args:
        name: one of `MODELS`, `MAPS`, `SERVED` or `BUSY`.
        large: whether ResNet-18, the GPT-2 shape and `BUSY` have the widths of the papers, for GPUs; the others have one size.

    Returns:
        `entry`, `body` and `head`, in training mode, on torch's default device.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        entry, body, head = (MODELS | MAPS | SERVED | BUSY)[name](large)
    return nn.Sequential(OrderedDict(entry=entry, body=body, head=head))


def batch_of(name: str, rows: int, large: bool = False) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets.

    Returns:
        Input [rows, ...] (float32, or int64 tokens) and target (float32, shaped like the output).
    """
    draw = torch.Generator().manual_seed(1)
    outputs = OUTPUTS
    if name in ("lstm", "gpt2", "gpt2-1024"):
        x = torch.randint(WORDS, (rows, _steps(name, large)), generator=draw)
        outputs = OUTPUTS if name == "lstm" else _words(large)
    elif name in BUSY:
        x = torch.randn(rows, 3, *2 * (_pixels(large),), generator=draw)
        outputs = _classes(large)
    else:
        x = torch.randn(rows, *INPUTS[name], generator=draw)
        outputs = 1 if name in ("tiny", "mlp", *SERVED) else OUTPUTS
    shape = (MAP_CLASSES, *INPUTS[name][1:]) if name in MAPS else (outputs,)
    return x, torch.randn(rows, *shape, generator=draw)


INPUTS = {
    "tiny": (1,),
    "mlp": (8,),
    "small": (8,),
    "cnn": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "transformer": (32, 16),
    "unet": (3, 512, 512),
}
Parts = tuple[nn.Module, nn.Module, nn.Module]


def _tiny(large: bool) -> Parts:
    return nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1)


def _small(large: bool) -> Parts:
    """MLP 8-50-50-1."""
    return nn.Linear(8, 50), nn.Sequential(nn.ReLU(), nn.Linear(50, 50), nn.ReLU()), nn.Linear(50, 1)


def _mlp(large: bool) -> Parts:
    return nn.Linear(8, 256), nn.Sequential(nn.ReLU(), nn.Linear(256, 256), nn.ReLU()), nn.Linear(256, 1)


def _cnn(large: bool) -> Parts:
    """Three convolutions with batch norm."""

    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(a), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(a, b, 3, padding=1, bias=False)]

    pooled = [nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    body = nn.Sequential(*block(16, 32), *block(32, 64), *pooled)
    return nn.Conv2d(3, 16, 3, padding=1, bias=False), body, nn.Linear(64, OUTPUTS)


class Residual(nn.Module):
    """Two convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.around = nn.Sequential()
        if stride != 1 or a != b:
            self.around = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.around(x))


def _resnet18(large: bool) -> Parts:
    """A variant for small images, without pooling at the start; width 16, or 64 as in the paper."""
    w = 64 if large else 16
    widths = [(w, w, 1), (w, 2 * w, 2), (2 * w, 4 * w, 2), (4 * w, 8 * w, 2)]
    blocks = [block for a, b, s in widths for block in (Residual(a, b, s), Residual(b, b, 1))]
    body = nn.Sequential(nn.BatchNorm2d(w), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Conv2d(3, w, 3, padding=1, bias=False), body, nn.Linear(8 * w, OUTPUTS)


class Encoder(nn.Module):
    """torch's transformer encoder, and the mean over the sequence."""

    def __init__(self, d: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).mean(1)


def _transformer(large: bool) -> Parts:
    return nn.Linear(16, 64), Encoder(64, 3), nn.Linear(64, OUTPUTS)


class Recurrent(nn.Module):
    """The last state of an LSTM."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(a, b, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


def _lstm(large: bool) -> Parts:
    return nn.Embedding(WORDS, 64), Recurrent(64, 128), nn.Linear(128, OUTPUTS)


class Tokens(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self, words: int, steps: int, d: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, d), nn.Embedding(steps, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))


class DecoderBlock(nn.Module):
    """Attention, causal by default, and a two-layer network, each after a layer norm (Radford et al. 2019)."""

    def __init__(self, d: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        rows, steps, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, steps, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(h.transpose(1, 2).reshape(rows, steps, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """The features of the last token, from which the next one is predicted."""

    def __init__(self, d: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm = nn.Sequential(*(DecoderBlock(d, heads) for _ in range(blocks))), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(x)[:, -1])


def _gpt2(large: bool, name: str = "gpt2") -> Parts:
    """Width 128, 4 blocks; or the smallest GPT-2, width 768, 12 blocks."""
    d, heads, blocks = (768, 12, 12) if large else (128, 4, 4)
    words = _words(large)
    return Tokens(words, _steps(name, large), d), Decoder(d, heads, blocks), nn.Linear(d, words, bias=False)


def _steps(name: str, large: bool) -> int:
    if name == "gpt2-1024":
        return 1024 if large else 64
    return 128 if large and name == "gpt2" else 32


def _words(large: bool) -> int:
    return 50_257 if large else WORDS


MODELS: dict[str, Callable[[bool], Parts]] = {
    "tiny": _tiny,
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet18": _resnet18,
    "transformer": _transformer,
    "lstm": _lstm,
    "gpt2": _gpt2,
}


class UNetBody(nn.Module):
    """A U-Net with two levels below the input's resolution, which its output has again (Ronneberger et al. 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def block(a: int, b: int, stride: int) -> nn.Sequential:
            return nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, b, 3, stride, 1, bias=False))

        self.down = nn.ModuleList([block(width, 2 * width, 2), block(2 * width, 4 * width, 2)])
        self.bottom = block(4 * width, 4 * width, 1)
        self.up = nn.ModuleList([block(6 * width, 2 * width, 1), block(3 * width, width, 1)])

    def forward(self, x: Tensor) -> Tensor:
        skips = [x]
        for down in self.down:
            skips.append(down(skips[-1]))
        h = self.bottom(skips.pop())
        for up in self.up:
            skip = skips.pop()
            h = up(torch.cat([F.interpolate(h, size=skip.shape[-2:], mode="bilinear"), skip], 1))
        return F.relu(h)


def _unet(large: bool) -> Parts:
    """Class scores of each pixel, at the resolution of the image."""
    return nn.Conv2d(3, 16, 3, padding=1, bias=False), UNetBody(16), nn.Conv2d(16, MAP_CLASSES, 1)


# models with maps of class scores, measured only for the target on maps
MAPS: dict[str, Callable[[bool], Parts]] = {"unet": _unet}
SERVED: dict[str, Callable[[bool], Parts]] = {"small": _small}  # measured only inside `frozen`


# ---- models that keep a GPU busy
class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, the last one with four times as many channels, and a shortcut (He et al. 2016)."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv3, self.bn3 = nn.Conv2d(b, 4 * b, 1, bias=False), nn.BatchNorm2d(4 * b)
        self.around = nn.Sequential()
        if stride != 1 or a != 4 * b:
            self.around = nn.Sequential(nn.Conv2d(a, 4 * b, 1, stride, bias=False), nn.BatchNorm2d(4 * b))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(h)) + self.around(x))


def _resnet50(large: bool) -> Parts:
    """Width 64 as in the paper, or 8."""
    w = 64 if large else 8
    blocks, a = [], w
    for stage, count in enumerate((3, 4, 6, 3)):
        for i in range(count):
            blocks.append(Bottleneck(a, w << stage, 2 if stage and not i else 1))
            a = 4 * (w << stage)
    start = [nn.BatchNorm2d(w), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    body = nn.Sequential(*start, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Conv2d(3, w, 7, 2, 3, bias=False), body, nn.Linear(a, _classes(large))


class Patches(nn.Module):
    """A class token and the patches of an image, with position embeddings -> features of the class token (Dosovitskiy et al. 2021)."""

    def __init__(self, patches: int, d: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, d)), nn.Parameter(torch.zeros(1, 1 + patches, d))
        self.blocks = nn.Sequential(*(DecoderBlock(d, heads, causal=False) for _ in range(blocks)))
        self.norm = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).mT], 1)
        return self.norm(self.blocks(h + self.places)[:, 0])


def _vit(large: bool) -> Parts:
    """ViT-B/16, or width 32 and 2 blocks."""
    d, heads, blocks = (768, 12, 12) if large else (32, 4, 2)
    body = Patches((_pixels(large) // 16) ** 2, d, heads, blocks)
    return nn.Conv2d(3, d, 16, 16), body, nn.Linear(d, _classes(large))


def _pixels(large: bool) -> int:
    return 224 if large else 32


def _classes(large: bool) -> int:
    return 1000 if large else OUTPUTS


BUSY: dict[str, Callable[[bool], Parts]] = {
    "resnet50": _resnet50,
    "vit": _vit,
    "gpt2-1024": functools.partial(_gpt2, name="gpt2-1024"),
}
