"""Networks of the `intents` benchmark and their training: a bag of embeddings and a small transformer on sentences of CLINC150."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workbench import compose, data, fit, laplace, sample, sculpt, snapshot, swag, vote
from workbench.data.texts import PADDING, UNKNOWN
from workbench.distributions import LogitNormal

LENGTH = 16  # words of a sentence; the few longer ones are cut
VOTERS, DRAWS, BATCH = 5, 20, 128
# chosen by the validation likelihood of a plain network with another seed, among learning rates of 0.003 to 0.04 (bag) and 0.001 to 0.02
# (transformer), weight decays of 0.1 to 1, 8 to 20 epochs, and 0, 10 or 20 % of the words unread; time limits the transformer's epochs
RECIPES: dict[str, dict[str, float]] = {
    "bag": {"epochs": 12, "lr": 0.02, "weight_decay": 0.1},
    "transformer": {"epochs": 6, "lr": 0.01, "weight_decay": 0.1},
}
# share of training words that are replaced by the unknown word, whose embedding is trained in no other way
UNREAD = 0.1

WRAPPERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: compose(output="logits"),
    "sculpt": lambda: sculpt.Wrapper(LogitNormal, output="logits"),
    "sample": lambda: sample.Wrapper(DRAWS, output="logits"),
    "laplace": lambda: laplace.Wrapper(n_samples=DRAWS, output="logits"),
    "swag": lambda: swag.Wrapper(VOTERS, start=0.5, output="logits"),
    "snapshot": lambda: snapshot.Wrapper(VOTERS, output="logits"),
    "vote last": lambda: vote.Wrapper(VOTERS, share=2, output="logits"),
    "vote rank1": lambda: vote.Wrapper(VOTERS, share="rank1", output="logits"),
    "vote": lambda: vote.Wrapper(VOTERS, evidence="design", output="logits"),
}


class Bag(nn.Module):
    """Mean of word embeddings and one hidden layer: word indices [n, words] -> class scores [n, classes].

    Args:
        words: size of the vocabulary.
        classes: number of classes.
        width: size of the embeddings; the hidden layer is twice as wide.
    """

    def __init__(self, words: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.head = _head(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_mean(self.words(x), x))


class Transformer(nn.Module):
    """One transformer encoder layer, mean of its outputs, and one hidden layer; inputs and arguments as for `Bag`."""

    def __init__(self, words: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = _head(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places[: x.shape[1]]
        return self.head(_mean(self.encoder(h, src_key_padding_mask=x == PADDING), x))


def _head(width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(2 * width, classes))


def _mean(h: Tensor, x: Tensor) -> Tensor:
    """Return the mean over words without padding [n, width]."""
    is_word = (x != PADDING)[..., None].to(h.dtype)
    return (h * is_word).sum(1) / is_word.sum(1).clamp_min(1)


NETWORKS: dict[str, type[nn.Module]] = {"bag": Bag, "transformer": Transformer}


@functools.cache
def sentences(n: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return word indices and intents of "train", "validation", "test" and "strange", the out-of-scope test sentences (class -100).

    Args:
        n: number of sentences per part; 0 for all.
    """
    loaded = data.load("clinc150")
    parts = {"train": loaded.train, "test": loaded.test}
    parts |= {"validation": loaded.parts["validation"], "strange": loaded.parts["out of scope"]}
    generator = torch.Generator().manual_seed(0)
    result = {}
    for name, part in parts.items():
        chosen = torch.randperm(len(part), generator=generator)[: n or None] if n else slice(None)
        result[name] = part.x[chosen, :LENGTH], part.y[chosen]
    return result


def trained(network: str, wrapper: str, seed: int, epochs: int, n: int, **recipe: float) -> Any:
    """Return a wrapped network in evaluation mode, trained on sentences with an intent; the validation sentences choose the epoch.

    Args:
        network: "bag" or "transformer".
        wrapper: one of `WRAPPERS`.
        seed: seed of weights, order and noise.
        epochs: passes over the sentences.
        n: number of sentences; 0 for all.
        recipe: settings that replace those of `RECIPES`.
    """
    parts = sentences(n)
    classes = int(max(y.max() for _, y in parts.values())) + 1
    words = int(max(x.max() for x, _ in parts.values())) + 1
    settings = {**RECIPES[network], **recipe}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = WRAPPERS[wrapper]()(NETWORKS[network](words, classes))
        fit(
            wrapped,
            parts["train"],
            epochs=epochs,
            batch_size=BATCH,
            lr=settings["lr"],
            weight_decay=settings["weight_decay"],
            validation=parts["validation"],
            standardize=False,
            augment=_unread,
            seed=seed,
            progress=False,
        )
    return wrapped.eval()


def _unread(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replace random words by the unknown word."""
    replaced = (torch.rand(x.shape, generator=generator) < UNREAD) & (x != PADDING)
    return x.masked_fill(replaced, UNKNOWN), y
