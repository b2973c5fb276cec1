"""State passed between calls under every wrapper: each model or sample as if streamed alone, or refused."""

import copy

import pytest
import torch
from helpers.streams import MODELS, STEPS, Cell, close, pair, stream
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import augment, compose, laplace, neo, sample, sculpt, snapshot, swag, vote

TARGET = torch.linspace(-1, 1, 6)[:, None]
DATA = [(STEPS[0], TARGET), (STEPS[1], -TARGET)]


def shaken(wrapped, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def collected(method, wrapped, times):
    for seed in range(times):
        shaken(wrapped, 0.1, seed)
        method.collect(wrapped)
    return wrapped


# by name: how it is wrapped and made ready, and the streams of the plain models that it should be the mean of
WRAPPERS = {
    "sculpt": (lambda m, s: sculpt.Wrapper(state=s)(m), lambda w, m: [m]),
    "neo": (lambda m, s: neo.Wrapper(state=s)(m).eval().fit(DATA), lambda w, m: [m]),
    "laplace": (lambda m, s: laplace.Wrapper(state=s)(m).eval().fit(DATA), lambda w, m: [m]),
    "swag": (
        lambda m, s: collected(swag, swag.Wrapper(3, state=s)(m), 4).eval().fit(DATA),
        lambda w, m: w.voters(),
    ),
    "snapshot": (lambda m, s: collected(snapshot, snapshot.Wrapper(2, state=s)(m), 2), lambda w, m: w.voters()),
    "vote_neo": (
        lambda m, s: compose(vote.Wrapper(2, state=s), neo.Wrapper())(m).eval().fit(DATA),
        lambda w, m: w.voters(),
    ),
    "vote_laplace": (
        lambda m, s: compose(vote.Wrapper(2, state=s), laplace.Wrapper())(m).eval().fit(DATA),
        lambda w, m: w.voters(),
    ),
}


@pytest.mark.parametrize("asked", [{}, {"return_risk": True}], ids=["prediction", "risk"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_every_model_of_a_wrapper_is_streamed_as_if_alone(kind, name, asked):
    torch.manual_seed(0)
    build, state = MODELS[name]
    model = build().eval()
    wrap, models_of = WRAPPERS[kind]
    wrapped = wrap(copy.deepcopy(model), state).eval()
    with torch.no_grad():
        y, _, risks = stream(wrapped, **asked)
        alone = torch.stack([stream(plain.eval())[0] for plain in models_of(wrapped, model)])
    assert close(y, alone.mean(0))
    if asked and kind in ("swag", "snapshot"):
        assert close(torch.stack([pair(risk)[0] for risk in risks]), alone.std(0, correction=0))


@pytest.mark.parametrize("name", MODELS)
def test_each_transform_has_a_stream_of_its_own(name):
    build, state = MODELS[name]
    model = build().eval()
    wrapped = augment.Wrapper([None, lambda x: -x], state=state)(copy.deepcopy(model)).eval()
    with torch.no_grad():
        alone = torch.stack([stream(model, sign * STEPS)[0] for sign in (1, -1)])
        y, _, risks = stream(wrapped, return_risk=True)
    assert close(y, alone.mean(0))
    assert close(torch.stack([pair(risk)[0] for risk in risks]), alone.std(0, correction=0))


class Sums(nn.Module):
    """A sum over the steps, and what the last of them has added."""

    def __init__(self):
        super().__init__()
        self.i, self.o = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x, total=None):
        added = self.o(torch.tanh(self.i(x)))
        total = added if total is None else total + added
        return total, total, added


def parts_of(state):
    parts = []
    state.map(parts.append)
    return torch.stack([part.clone() for part in parts])


@pytest.mark.parametrize("where", ["activations", "weights", "inputs"])
@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
def test_each_sample_goes_on_from_its_own(where, strategy):
    torch.manual_seed(0)
    wrapped = sample.Wrapper(4, sample.Normal(0.2), where=where, strategy=strategy, state=(1, 2))(Sums()).eval()
    total, added = None, 0
    with torch.no_grad():
        for x in STEPS:
            (y, total, last), risk = wrapped(x, total, return_risk=True)
            added = added + parts_of(last)
            assert len(added.unique(dim=0)) == 4
            assert close(parts_of(total), added)
            assert close(y, added.mean(0))
            assert close(risk[0], added.std(0, correction=0))


class Fed(Cell):
    """What the last layer gives is the state."""

    def forward(self, x, last=None):
        y = self.head(torch.tanh(self.i(x) + (0 if last is None else self.h(last.expand(-1, 8)))))
        return y, y


def test_laplace_refuses_a_state_behind_its_layer():
    with pytest.raises(
        ValueError, match=r"the state that the model passes to its next call depends on the output of 'head'.*use vote"
    ):
        laplace.Wrapper(state=1)(Fed()).eval().fit(DATA)


# ---- one trunk
class Count(TorchDispatchMode):
    """Counts the products with a weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.count = weight.data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        product = function.overloadpacket.__name__ in ("addmm", "mm", "linear", "matmul")
        if product and any(isinstance(x, torch.Tensor) and x.data_ptr() == self.weight for x in args):
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", [{}, {"return_risk": True}], ids=["prediction", "risk"])
@pytest.mark.parametrize("name", ["cell", "gru", "cache"])
def test_a_shared_trunk_runs_once_in_every_call(name, asked):
    build, state = MODELS[name]
    wrapped = vote.Wrapper(4, share=1, state=state)(build()).eval()
    trunk = next(p for key, p in wrapped.named_parameters() if "@" not in key and p.dim() == 2)
    with torch.no_grad():
        _, handed, _ = stream(wrapped, STEPS[:2], **asked)  # the first call looks closer
        for step in (2, 3, 4):
            handed = copy.deepcopy(handed) if step == 3 else handed.map(lambda part: part)
            with Count(trunk) as counting:
                out = wrapped(STEPS[step], handed, **asked)
            handed = pair(out[0] if asked else out)[1]
            assert counting.count == 1


# ---- compiled and exported
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [None, 1])
@pytest.mark.slow
def test_compiled_models_stream_as_if_alone(name, share):
    build, state = MODELS[name]
    wrapped = vote.Wrapper(2, share=share, state=state)(build()).eval()
    with torch.no_grad():
        expected = torch.stack([stream(voter.eval(), STEPS[:3])[0] for voter in wrapped.voters()]).mean(0)
        assert close(stream(torch.compile(wrapped, backend="eager"), STEPS[:3])[0], expected)


def test_a_full_graph_and_an_export_are_refused_with_the_reason():
    wrapped = vote.Wrapper(2, state=1)(Cell()).eval()
    with torch.no_grad():
        wrapped(STEPS[0])
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"hands on state .*without fullgraph=True"):
            torch.compile(wrapped, backend="eager", fullgraph=True)(STEPS[0])
        with pytest.raises(ValueError, match=r"torch\.export does not support Cell.*wrapped\.voters\(\)"):
            torch.export.export(wrapped, (STEPS[0],), strict=False)
        voter = wrapped.voters()[0].eval()
        exported = torch.export.export(voter, (STEPS[1], voter(STEPS[0])[1])).module()
        assert close(exported(STEPS[1], voter(STEPS[0])[1])[0], stream(voter, STEPS[:2])[0][1])
