"""Data, models and a reader of HTML for the tests of widgets."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import torch
from torch import nn

from helpers.calibration_models import inputs, rng
from workbench import vote
from workbench.data import Card, Column, Data, Split

CARD = Card("made up", "computed", "none", "none")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(n: int = 80, features: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    x = draw(n, features)
    return x, x.sum(1, keepdim=True) + 0.1 * draw(n, 1, seed=1)


def small(features: int = 3, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, outputs))


def beams(n: int = 40, test: int = 30) -> Data:
    """Return rows x = [mu, raw] of `known`, with the target mu + 1."""
    mu = torch.randn(n + test, 1, generator=rng(1))
    x = inputs(mu, 0.1 + torch.rand(n + test, 1, generator=rng(2)))
    parts = Split(x[:n], mu[:n] + 1), Split(x[n:], mu[n:] + 1)
    return Data(
        "beams", "regression", *parts, (Column("load", "N"), Column("raw <1>")), Column("strength", "MPa"), CARD
    )


def pictures(n: int = 30) -> Data:
    """Return images 1 x 6 x 6 of three classes: a bright row at the top, in the middle or at the bottom."""
    labels = torch.arange(2 * n) % 3
    x = 0.2 * torch.rand(2 * n, 1, 6, 6, generator=rng(3))
    x[torch.arange(2 * n), 0, 2 * labels] = 1.0
    parts = Split(x[:n], labels[:n]), Split(x[n:], labels[n:])
    names = ("top", "middle", "<below>")
    return Data("stripes", "classification", *parts, (Column("brightness"),), Column("place"), CARD, names)


def voters(**settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return vote.Wrapper(4, output="logits", **settings)(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))


class Outline(HTMLParser):
    """Parser that checks that every tag closes, and keeps all attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
