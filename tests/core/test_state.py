"""State that the caller passes from call to call: every branch keeps its own, as each voter streamed alone does."""

import copy
import io
import pickle

import pytest
import torch
from helpers.streams import MODELS, STEPS, Cached, Cell, alone, close, pair, stream
from torch import nn

import workbench
from workbench import augment, compose, neo, sample, sculpt, vote
from workbench.outputs import State

STRATEGIES = ("auto", "vmap", "rescue", "replay", "loop", "tune")
REFUSED = {("vmap", "lstm"), ("vmap", "cache"), ("rescue", "cache")}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [None, 1, "rank1"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_voter_is_streamed_as_if_alone(name, share, strategy):
    build, state = MODELS[name]
    wrapped = vote.Wrapper(5, share=share, state=state, strategy=strategy)(build()).eval()
    with torch.no_grad():
        expected = alone(wrapped)
        # one executor was insisted on; a shared trunk is not stacked
        if (strategy, name) in REFUSED and (share != 1 or name != "lstm"):
            with pytest.raises((RuntimeError, ValueError), match='strategy="loop"'):
                stream(wrapped)
            return
        y, _, _ = stream(wrapped)
        assert close(y, expected.mean(0))
        y, _, risks = stream(wrapped, return_risk=True)
        assert close(y, expected.mean(0))
        risks = [pair(risk)[0] for risk in risks]
        assert close(torch.stack(risks), expected.std(0, correction=0))


@pytest.mark.parametrize("model", [nn.LSTM(2, 8, 2), nn.GRU(2, 8), nn.RNN(2, 8, bidirectional=True)])
def test_recurrent_layers_by_themselves(model):
    wrapped = vote.Wrapper(3, state=1)(model).eval()
    with torch.no_grad():
        assert close(stream(wrapped, STEPS[:, None])[0], alone(wrapped, STEPS[:, None]).mean(0))


def test_each_of_several_states_among_nested_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(2, 8)

        def forward(self, x, inside=None):
            h, c = self.cell(x, None if inside is None else (inside["h"][0], inside["c"]))
            return h[:, :1], h, c

    wrapped = vote.Wrapper(3, state=(1, 2))(Two()).eval()
    with torch.no_grad():
        expected = []
        for voter in wrapped.voters():
            _, h, c = voter.eval()(STEPS[0])
            expected.append(voter(STEPS[1], {"h": [h], "c": c})[0])
        _, h, c = wrapped(STEPS[0])
        assert close(wrapped(STEPS[1], {"h": [h], "c": c})[0], torch.stack(expected).mean(0))


def head_alone(wrapped, place):
    """The model of one branch of vote x sculpt: a voter, or its risk head with all the layers that it has of its own."""
    plain = wrapped.voters()[place["vote"]].eval()
    if place["sculpt"]:
        named = dict(wrapped.named_parameters())
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                key = next((k for k in named if k.startswith(f"{name}@") and "sculpt" in k), None)
                if key is not None:
                    value = named[key]
                    parameter.copy_(value[place["vote"]] if value.shape != parameter.shape else value)
    return plain


@pytest.mark.parametrize("n_layers", [1, 3])
def test_the_risk_heads_of_sculpt_have_states_of_their_own(n_layers):
    wrapped = compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=n_layers, state=1))(Cell()).eval()
    with torch.no_grad():
        y, state, _ = stream(wrapped, return_risk=True)
        heads = [[stream(head_alone(wrapped, {"vote": v, "sculpt": s}))[1] for s in (0, 1)] for v in range(3)]
        parts = []
        state.map(parts.append)
        assert close(y, alone(wrapped).mean(0))
    distinct = [h for voter in heads for h in (voter if n_layers == 3 else voter[:1])]
    assert all(any(close(part, h) for h in distinct) for part in parts)


def test_sculpt_alone_predicts_as_the_model():
    model = Cell().eval()
    wrapped = sculpt.Wrapper(state=1)(model).eval()
    with torch.no_grad():
        expected = stream(model)[0]
        assert close(stream(wrapped)[0], expected)
        assert close(stream(wrapped, return_risk=True)[0], expected)


def test_samples_and_transforms_and_features():
    with torch.no_grad():
        wrapped = sample.Wrapper(4, state=1, strategy="loop")(Cell()).eval()
        y, state, risks = stream(wrapped, return_risk=True)
        assert "4 sample" in repr(state)
        assert float(risks[-1][0].min()) > 0
        assert y.shape == (5, 6, 1)
        model = Cell().eval()
        wrapped = augment.Wrapper([lambda x: x, lambda x: -x], state=1)(model).eval()
        expected = torch.stack([stream(model, sign * STEPS)[0] for sign in (1, -1)]).mean(0)
        assert close(stream(wrapped)[0], expected)
        wrapped = neo.Wrapper(state=1)(model).eval().fit(STEPS[0])
        expected = stream(model)[0]
        assert close(stream(wrapped, return_risk=True)[0], expected)
        assert close(stream(wrapped)[0], expected)
        both = compose(vote.Wrapper(2, state="cache"), neo.Wrapper())(Cached()).eval().fit(STEPS[0])
        y, _, risks = stream(both, return_risk=True)
        assert close(y, alone(both).mean(0))
        assert risks[-1].vacuitic.shape == (6,)


@pytest.mark.parametrize("strategy", ["vmap", "replay"])
def test_branches_of_one_trunk_go_on_sharing_it(strategy):
    wrapped = vote.Wrapper(4, share=1, strategy=strategy, state=1)(Cell()).eval()
    with torch.no_grad():
        parts = []
        stream(wrapped)[1].map(parts.append)
    assert len(parts) == 1  # the same tensor for all, so that it was looked at once


@pytest.mark.parametrize("strategy", ["auto", "replay"])
def test_a_cache_of_one_trunk_is_shared(strategy):
    wrapped = vote.Wrapper(4, share=1, strategy=strategy, state="cache")(Cached()).eval()
    with torch.no_grad():
        expected = alone(wrapped)
        y, state, _ = stream(wrapped)
    assert close(y, expected.mean(0))
    assert len({id(tensor) for tensor in state.tensors()}) == 1


# ---- what is done with a state
def ways(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(state),
        "pickle": pickle.loads(pickle.dumps(state)),
        "save": torch.load(buffer, weights_only=False),
        "to": state.to("cpu", torch.float32),
        "detach": state.detach(),
        "map": state.map(lambda part: part),
    }


@pytest.mark.parametrize("name", ["cell", "cache"])
def test_copies_go_on_alike(name):
    build, state = MODELS[name]
    wrapped = vote.Wrapper(3, state=state)(build()).eval()
    with torch.no_grad():
        for way in ways(stream(wrapped, STEPS[:3])[1]):
            # a cache is changed in place by who goes on from it
            other = ways(stream(wrapped, STEPS[:3])[1])[way]
            assert close(pair(wrapped(STEPS[3], other))[0], alone(wrapped, STEPS[:4])[:, 3].mean(0)), way
        twin = copy.deepcopy(wrapped)
        other = stream(wrapped, STEPS[:3])[1]
        assert close(pair(twin(STEPS[3], other))[0], alone(wrapped, STEPS[:4])[:, 3].mean(0))


def test_a_cache_that_is_changed_in_place_need_not_be_taken_from_the_output():
    for strategy in ("auto", "loop", "replay"):
        share = 1 if strategy == "replay" else None
        wrapped = vote.Wrapper(3, state="cache", strategy=strategy, share=share)(Cached()).eval()
        with torch.no_grad():
            state = wrapped(STEPS[0])["cache"]
            ys = [wrapped(x, state)["y"] for x in STEPS[1:]]
            assert close(torch.stack(ys), alone(wrapped)[:, 1:].mean(0))


def test_rows_are_picked_and_caches_cropped_and_reordered():
    rows = torch.tensor([3, 3, 0, 1, 5, 2])
    wrapped = vote.Wrapper(3, state=1)(Cell()).eval()
    cached = vote.Wrapper(3, state="cache")(Cached()).eval()
    with torch.no_grad():
        state = wrapped(STEPS[0])[1].map(lambda h: h[rows])
        expected = [v.eval()(STEPS[1], v(STEPS[0])[1][rows])[0] for v in wrapped.voters()]
        assert close(wrapped(STEPS[1], state)[0], torch.stack(expected).mean(0))
        state = stream(cached, STEPS[:3])[1].map(lambda cache: cache.crop(2)).map(lambda cache: cache.reorder(rows))
        expected = []
        for voter in cached.voters():
            cache = stream(voter.eval(), STEPS[:3])[1]
            cache.crop(2)
            cache.reorder(rows)
            expected.append(voter(STEPS[3], cache)["y"])
        assert close(cached(STEPS[3], state)["y"], torch.stack(expected).mean(0))


def test_everything_else_is_refused_with_a_remedy():
    state = vote.Wrapper(3, state=1)(Cell()).eval()(STEPS[0])[1]
    for wrong in (
        lambda: state + 1,
        lambda: 2 * state,
        lambda: state[0],
        lambda: list(state),
        lambda: len(state),
        lambda: torch.cat([state, state]),
        lambda: torch.tanh(state),
        lambda: Cell()(STEPS[0], state),
        lambda: state > 0,
        lambda: bool(state),
    ):
        with pytest.raises(TypeError, match=r"state\.map"):
            wrong()
    with pytest.raises(AttributeError, match=r"no 'shape'.*state\.map"):
        _ = state.shape
    assert not hasattr(state, "crop")


def test_other_branches_are_refused_with_a_remedy():
    with torch.no_grad():
        state = vote.Wrapper(3, state=1)(Cell()).eval()(STEPS[0])[1]
        with pytest.raises(ValueError, match="3 vote, and this call has 4 vote"):
            vote.Wrapper(4, state=1)(Cell()).eval()(STEPS[1], state)
        with pytest.raises(ValueError, match="3 vote, and this call has 3 sample"):
            sample.Wrapper(3, state=1)(Cell()).eval()(STEPS[1], state)
        wrapped = compose(vote.Wrapper(3, state=1), sculpt.Wrapper())(Cell()).eval()
        with pytest.raises(ValueError, match="return_risk"):
            wrapped(STEPS[1], wrapped(STEPS[0])[1], return_risk=True)
        (_, state), _ = wrapped(STEPS[0], return_risk=True)  # more branches than a prediction needs
        expected = alone(wrapped, STEPS[:2])[:, 1].mean(0)
        assert close(wrapped(STEPS[1], state)[0], expected)


def test_an_encoder_hands_each_voter_of_a_decoder_its_own():
    encoder, decoder = (vote.Wrapper(3, state=1)(Cell()).eval() for _ in range(2))
    with torch.no_grad():
        expected = [d.eval()(STEPS[1], e.eval()(STEPS[0])[1])[0] for e, d in zip(encoder.voters(), decoder.voters())]  # noqa: B905
        assert close(decoder(STEPS[1], encoder(STEPS[0])[1])[0], torch.stack(expected).mean(0))


# ---- training
def test_gradients_through_time_are_those_of_each_voter():
    for strategy in ("loop", "vmap"):
        wrapped = vote.Wrapper(3, state=1, strategy=strategy, share=2)(Cell())
        y, _, _ = stream(wrapped, tile_and_reduce=True)
        y.square().sum().backward()
        weight = dict(wrapped.named_parameters())["h.weight@vote"].grad
        voters = wrapped.voters()
        torch.stack([stream(voter)[0] for voter in voters]).mean(0).square().sum().backward()
        assert close(weight, torch.stack([voter.h.weight.grad for voter in voters]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_rows", [6, 5])
def test_rows_that_are_dealt_stay_with_their_voter(name, n_rows):
    build, state = MODELS[name]
    steps = STEPS[:, :n_rows]
    for strategy in ("auto", "loop"):
        wrapped = vote.Wrapper(3, state=state, strategy=strategy)(build())
        torch.manual_seed(0)
        y, last, _ = stream(wrapped, steps)
        expected = alone(wrapped, steps)
        for voter, rows in enumerate(last.rows):
            assert close(y[:, rows], expected[voter][:, rows])


def test_dealt_states_are_not_mixed_up_with_others():
    wrapped = vote.Wrapper(3, state=1)(Cell())
    state = wrapped(STEPS[0])[1]
    with pytest.raises(ValueError, match="tile_and_reduce=True"):
        wrapped(STEPS[1], state, return_risk=True)
    with pytest.raises(ValueError, match="batch of 6 rows"):
        wrapped(STEPS[1][:4], state)
    with pytest.raises(ValueError, match="tile_and_reduce=True"):
        wrapped.eval()(STEPS[1], state)
    whole = wrapped(STEPS[0])[1]
    with pytest.warns(workbench.WorkbenchWarning, match="every voter answered all rows"):
        y = wrapped.train()(STEPS[1], whole)[0]
    assert close(y, alone(wrapped, STEPS[:2])[:, 1].mean(0))


def test_losses_of_a_stream():
    wrapped = compose(vote.Wrapper(3, state=1), sculpt.Wrapper(n_layers=1))(Cell())
    (_, state), _ = wrapped(STEPS[0], return_risk=True)
    target = STEPS[1][:, :1]
    loss = wrapped.loss(lambda out, y: nn.functional.mse_loss(out[0], y), (STEPS[1], state.detach()), target)
    loss.backward()
    assert bool(loss.isfinite())


# ---- settings
def test_the_setting_travels(tmp_path):
    wrapped = vote.Wrapper(2, state=("cache",))(Cached()).eval()
    workbench.save(wrapped, tmp_path / "model.safetensors")
    again = workbench.load(tmp_path / "model.safetensors", Cached()).eval()
    with torch.no_grad():
        assert close(stream(again)[0], stream(wrapped)[0])
    with pytest.raises(ValueError, match="state must be an index"):
        vote.Wrapper(2, state=1.5)
    assert repr(stream(wrapped)[1]) == "BranchedState(2 vote: Cache)"


@pytest.mark.slow
def test_a_compiled_model_breaks_the_graph_and_is_right():
    wrapped = vote.Wrapper(2, state=1)(Cell()).eval()
    compiled = torch.compile(wrapped, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            assert close(stream(compiled)[0], alone(wrapped).mean(0))


@pytest.mark.parametrize("said", [{"state": 1}, {"output": {0: "values", 1: State()}}])
def test_a_state_is_named_by_either_option(said):
    wrapped = vote.Wrapper(5, **said)(Cell()).eval()
    with torch.no_grad():
        y, _, _ = stream(wrapped)
        assert close(y, alone(wrapped).mean(0))


def test_a_state_alone_predicts_nothing():
    with pytest.raises(ValueError, match="leaves nothing to predict"):
        vote.Wrapper(output=State())
