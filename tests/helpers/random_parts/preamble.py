"""What the programs of random models begin with; parts name what it imports and defines."""
# ruff: noqa: F401

import collections
import copy
import dataclasses
import functools
import itertools
import math
import operator
import threading
import types
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, d) / d)
        self.layer = nn.Linear(d, d)

    def forward(self, x, scale=1.0):
        return x + scale * self.layer(x @ self.w).tanh()


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return -0.5 * grad * w, (grad * x).sum(0)


class MatMul(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


class Symmetric(nn.Module):
    def forward(self, w):
        return (w + w.T) / 2


class Holder:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


class Base(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a = nn.Linear(d, d)

    def forward(self, x):
        return self.a(x)


class Derived(Base):
    def __init__(self, d):
        super().__init__(d)
        self.b = nn.Linear(d, d)

    @property
    def both(self):
        return self.a.weight + self.b.weight

    @functools.cached_property
    def size(self):
        return self.a.weight.shape[0]

    def forward(self, x):
        return super().forward(x) + F.linear(x, self.both) / self.size


class Child(nn.Module):
    def __init__(self, parent, d):
        super().__init__()
        self.parent = [parent]
        self.d = d
        self.w = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * self.w * self.parent[0].factor


@functools.lru_cache(None)
def table(d):
    return torch.arange(d) / d


@dataclasses.dataclass
class Config:
    scale: float = 0.5
    names: tuple = ("a", "b")


SEEN: list = []


def halves(x):
    yield x[:, ::2]
    yield x[:, 1::2]
