"""A mean over branches that returns as an input in place of state is refused; one that returns as data is not."""

import copy
import io
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn

from workbench import compose, sculpt, vote

X = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.h, self.head = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, h=None):
        h = torch.tanh(self.i(x) + (0 if h is None else self.h(h)))
        return self.head(h), h


class Nested(Cell):
    def forward(self, x, past=None):
        y, h = super().forward(x, None if past is None else past[0]["keys"])
        return {"y": y, "past": [{"keys": h}]}


class Box:
    def __init__(self, h):
        self.h = h


class Boxed(Cell):
    def forward(self, x, box=None):
        return super().forward(x, None if box is None else box.h)


class First(Cell):
    """The state is the first parameter."""

    def forward(self, hidden, x):
        y, h = super().forward(x, hidden)
        return h, y


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x, last=None):
        return self.fc(torch.cat([x, x if last is None else last], 1))


class Pair(NamedTuple):
    y: torch.Tensor
    spread: torch.Tensor


class Spread(Forecaster):
    def forward(self, x):
        y = super().forward(x)
        return Pair(y, y.exp())


def saved(h):
    file = io.BytesIO()
    torch.save(h, file)
    file.seek(0)
    return torch.load(file)


WAYS = {
    "itself": lambda h: h,
    "detached": torch.Tensor.detach,
    "slice": lambda h: h[:, :],
    "view": lambda h: h.view(8, 4).view(4, 8),
    "deepcopy": copy.deepcopy,
    "slice_of_a_copy": lambda h: copy.deepcopy(h)[:4],
    "pickled": lambda h: pickle.loads(pickle.dumps(h)),
    "saved": saved,
    "in_place": lambda h: h.mul_(0.5),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", [{}, {"return_risk": True}])
def test_a_state_is_refused_with_the_line_to_write(way, asked):
    wrapped = vote.Wrapper(3)(Cell()).eval()
    with torch.no_grad():
        _, h = wrapped(X)
        with pytest.raises(ValueError, match=r"'h' of Cell .* state=1,.* state=\(\)"):
            wrapped(X, WAYS[way](h), **asked)
        with pytest.raises(ValueError, match="state=1"):
            wrapped(h=WAYS[way](h), x=X)


def test_it_is_refused_in_trees_and_objects_and_copies_of_the_model():
    wrapped = vote.Wrapper(3)(Nested()).eval()
    with torch.no_grad():
        out = wrapped(X)
        with pytest.raises(ValueError, match=r"state='past\.0\.keys'"):
            wrapped(X, copy.deepcopy(out)["past"])
        with pytest.raises(ValueError, match=r"state='past\.0\.keys'"):
            copy.deepcopy(wrapped)(X, copy.deepcopy(out["past"]))
        wrapped = vote.Wrapper(3)(Boxed()).eval()
        with pytest.raises(ValueError, match=r"a Box among the inputs .* state=1"):
            wrapped(X, Box(wrapped(X)[1]))


def test_training_and_the_loss():
    wrapped = vote.Wrapper(3)(Cell())
    _, h = wrapped(X, tile_and_reduce=True)
    with pytest.raises(ValueError, match="state=1"):
        wrapped(X, h.detach())
    with pytest.raises(ValueError, match="state=1"):
        wrapped.loss(lambda out, y: (out[0] - y).square().mean(), (X, h), X)


@pytest.mark.parametrize("model", [nn.GRUCell(2, 8), nn.RNNCell(2, 8)])
def test_the_only_output_of_a_cell(model):
    wrapped = vote.Wrapper(3)(model).eval()
    with pytest.raises(ValueError, match="return h, h"):
        wrapped(X, wrapped(X))


def test_a_state_that_comes_first():
    wrapped = vote.Wrapper(3)(First()).eval()
    h, _ = wrapped(torch.zeros(4, 8), X)
    with pytest.raises(ValueError, match=r"state=0"):
        wrapped(h, X)


def test_other_states_are_named_along_with_those_that_are_said():
    wrapped = vote.Wrapper(3, state=1)(nn.LSTM(2, 8)).eval()
    wrapped(X)  # (out, (h, c)), all of the state named
    wrapped = vote.Wrapper(3, state="1.0")(nn.LSTM(2, 8)).eval()
    _, (h, c) = wrapped(X)
    with pytest.raises(ValueError, match=r"state=\('1.0', '1.1'\)"):
        wrapped(X, (h, c))


# ---- what is data
def test_forecasts_go_on_from_their_own_mean():
    with torch.no_grad():
        for wrapped, pick in (
            (vote.Wrapper(3)(Forecaster()).eval(), lambda out: out),
            (vote.Wrapper(3)(Spread()).eval(), lambda out: out.y),
        ):
            y = X
            for _ in range(3):
                expected = torch.stack([pick(voter.eval()(y)) for voter in wrapped.voters()]).mean(0)
                y = pick(wrapped(y))
                assert torch.allclose(y, expected, atol=1e-6)
        wrapped = vote.Wrapper(3)(Forecaster()).eval()
        last = wrapped(X)
        assert wrapped(X, last).shape == wrapped(x=X, last=last).shape == (4, 2)


def test_what_one_branch_gave_or_who_says_that_it_is_data():
    with torch.no_grad():
        for wrapped in (
            compose()(Cell()).eval(),
            sculpt.Wrapper()(Cell()).eval(),
            vote.Wrapper(1)(Cell()).eval(),
            vote.Wrapper(3, state=())(Cell()).eval(),
        ):
            wrapped(X, wrapped(X)[1])


def test_tensors_of_the_caller_and_of_other_models():
    encoder, decoder = (vote.Wrapper(3)(Cell()).eval() for _ in range(2))
    with torch.no_grad():
        h = torch.zeros(4, 8)
        decoder(X, h)
        decoder(X, encoder(X)[1])
        decoder(X, decoder(X)[1] * 0.5)  # what is computed from a mean is the caller's
        Cell()(X, decoder(X)[1])


def test_marks_keep_nothing_alive():
    from workbench.core.ownership import marks_of

    wrapped = vote.Wrapper(3)(Cell()).eval()
    with torch.no_grad():
        for _ in range(300):
            wrapped(X)
    assert len(marks_of(wrapped)._storages) < 200


@pytest.mark.slow
def test_compiled_models_refuse_as_well():
    wrapped = vote.Wrapper(3)(Cell()).eval()
    compiled = torch.compile(wrapped, backend="eager")
    with torch.no_grad():
        _, h = compiled(X)
        _, h = compiled(X)
        with pytest.raises(ValueError, match="state=1"):
            compiled(X, h)


# ---- caches, which are objects
class Cache:
    def __init__(self):
        self.keys = None

    def update(self, keys):
        self.keys = keys[:, None] if self.keys is None else torch.cat([self.keys, keys[:, None]], 1)
        return self.keys


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.head = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x, cache=None):
        cache = Cache() if cache is None else cache
        return {"y": self.head(cache.update(self.k(x)).mean(1)), "cache": cache}


@pytest.mark.parametrize("way", ["deepcopy", "pickled"])
@pytest.mark.parametrize("with_cache", [False, True])
def test_copies_of_a_cache_are_refused(way, with_cache):
    wrapped = vote.Wrapper(3)(Cached()).eval()
    with torch.no_grad():
        cache = Cache() if with_cache else None
        for _ in range(2):
            cache = wrapped(X, cache)["cache"]
        with pytest.raises(RuntimeError, match="state="):
            wrapped(X, WAYS[way](cache))
        cropped = copy.deepcopy(cache)
        cropped.keys = cropped.keys[:, [0]]
        with pytest.raises(RuntimeError, match="state="):
            wrapped(X, cropped)
        cache.keys = cache.keys[:, :1]
        with pytest.raises(RuntimeError, match=r"state\.map"):
            wrapped(X, cache)
