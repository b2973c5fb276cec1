"""Models whose state the caller passes on, and streams of inputs for them."""

import torch
from torch import nn

STEPS = torch.randn(5, 6, 2, generator=torch.Generator().manual_seed(0))


class Cell(nn.Module):
    """A recurrent cell (y, h) = cell(x, h) in operations that vmap supports."""

    def __init__(self):
        super().__init__()
        self.i, self.h, self.head = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, h=None):
        h = torch.tanh(self.i(x) + (0 if h is None else self.h(h)))
        return self.head(h), h


class GRU(Cell):
    def __init__(self):
        nn.Module.__init__(self)
        self.cell, self.head = nn.GRUCell(2, 8), nn.Linear(8, 1)

    def forward(self, x, h=None):
        h = self.cell(x, h)
        return self.head(h), h


class Sequence(nn.Module):
    """An LSTM whose state is nested in a dict."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x, state=None):
        out, state = self.rnn(x[:, None], state)
        return {"y": self.head(out[:, 0]), "more": {"state": state, "length": 1}}


class Cache:
    """A cache of the keys of all steps so far, changed in place."""

    def __init__(self):
        self.keys, self.steps = None, 0

    def update(self, keys):
        self.keys = keys[:, None] if self.keys is None else torch.cat([self.keys, keys[:, None]], 1)
        self.steps += 1
        return self.keys

    def crop(self, n):
        self.keys, self.steps = self.keys[:, :n], n

    def reorder(self, rows):
        self.keys = self.keys[rows]


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.head = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x, cache=None):
        cache = Cache() if cache is None else cache
        return {"y": self.head(cache.update(self.k(x)).cumsum(1).mean(1)), "cache": cache}


def pair(out):
    if isinstance(out, tuple):
        return out
    return out["y"], out["cache"] if "cache" in out else out["more"]["state"]


def stream(model, steps=STEPS, **options):
    """Return all predictions, the last state and, on request, all risks."""
    state, ys, risks = None, [], []
    for x in steps:
        out = model(x, **options) if state is None else model(x, state, **options)
        if options.get("return_risk"):
            out, risk = out
            risks.append(risk)
        y, state = pair(out)
        ys.append(y)
    return torch.stack(ys), state, risks


def alone(wrapped, steps=STEPS):
    return torch.stack([stream(voter.train(wrapped.training), steps)[0] for voter in wrapped.voters()])


def close(a, b):
    return torch.allclose(a, b, atol=1e-5)


MODELS = {"cell": (Cell, 1), "gru": (GRU, 1), "lstm": (Sequence, "more.state"), "cache": (Cached, "cache")}
