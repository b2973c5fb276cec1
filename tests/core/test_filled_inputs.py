"""Lists, dicts, objects and tensors of the caller that forward fills in place: each branch has its own, or the call is refused."""

import copy
import dataclasses
import pickle

import pytest
import torch
from helpers.streams import STEPS, close
from torch import nn

from workbench import augment, compose, neo, sculpt, vote
from workbench.engine.state import BranchedState


class Keeps(nn.Module):
    """A layer, a head, and what is kept in between."""

    def __init__(self):
        super().__init__()
        self.k, self.head = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x, kept=None):
        return self.head(torch.tanh(self.keep(self.k(x), kept)))


class Appends(Keeps):
    def keep(self, h, kept):
        kept.append(h)
        return torch.stack(list(kept)).cumsum(0).mean(0)


class Enters(Keeps):
    def keep(self, h, kept):
        kept["h"] = h if "h" not in kept else torch.tanh(kept["h"] + h)
        kept["steps"] = kept.get("steps", 0) + 1
        return kept["h"] * kept["steps"]


class Exchanges(Keeps):
    def keep(self, h, kept):
        kept[0] = h if kept[0] is None else torch.tanh(kept[0] + h)
        return kept[0]


class Nests(Keeps):
    def keep(self, h, kept):
        kept["layers"][0].append({"pair": (h, 2 * h)})
        return sum(part for item in kept["layers"][0] for part in item["pair"])


class Pops(Keeps):
    """Keeps the two latest."""

    def keep(self, h, kept):
        kept.append(h)
        if len(kept) > 2:
            kept.pop(0)
        return torch.stack(list(kept)).cumsum(0).mean(0)


@dataclasses.dataclass
class Record:
    h: torch.Tensor | None = None


class Sets(Keeps):
    def keep(self, h, kept):
        kept.h = h if kept.h is None else torch.tanh(kept.h + h)
        return kept.h


class Box:
    h = None


class WritesIntoWhatItKeeps(Keeps):
    def keep(self, h, kept):
        if kept:
            kept[0].mul_(0.5).add_(h)
        else:
            kept.append(h.clone())
        return kept[0]


CASES = {
    "append": (Appends, list),
    "dict": (Enters, dict),
    "item": (Exchanges, lambda: [None]),
    "nested": (Nests, lambda: {"layers": [[], []]}),
    "window": (Pops, list),
    "dataclass": (Sets, Record),
    "object": (Sets, Box),
    "in_place": (WritesIntoWhatItKeeps, list),
}


def stream(model, kept, steps=STEPS, **asked):
    outs = [model(x, kept, **asked) for x in steps]
    return torch.stack([out[0] if asked else out for out in outs]), [out[1] for out in outs] if asked else []


def alone(wrapped, make):
    return torch.stack([stream(voter.train(wrapped.training), make())[0] for voter in wrapped.voters()])


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("share", [None, 1, "rank1"])
@pytest.mark.parametrize("name", CASES)
def test_each_voter_has_its_own(name, share, strategy):
    build, make = CASES[name]
    wrapped = vote.Wrapper(3, share=share, strategy=strategy)(build()).eval()
    with torch.no_grad():
        expected = alone(wrapped, make)
        y, risks = stream(wrapped, make(), return_risk=True)
    assert close(y, expected.mean(0))
    assert close(torch.stack(risks), expected.std(0, correction=0))


@pytest.mark.parametrize("strategy", ["vmap", "rescue", "replay"])
def test_rungs_that_a_user_insists_on_are_right_for_a_trunk_and_vmap_refuses_the_rest(strategy):
    with torch.no_grad():
        wrapped = vote.Wrapper(3, share=1, strategy=strategy)(Appends()).eval()
        assert close(stream(wrapped, [])[0], alone(wrapped, list).mean(0))
        wrapped = vote.Wrapper(3, strategy=strategy)(Appends()).eval()
        if strategy == "replay":
            assert close(stream(wrapped, [])[0], alone(wrapped, list).mean(0))
            return
        kept = []
        with pytest.raises(RuntimeError, match=r'fills a list or dict among its inputs.*strategy="loop"'):
            wrapped(STEPS[0], kept)
        assert kept == []


@pytest.mark.parametrize("wrapper", [sculpt.Wrapper(), neo.Wrapper(), augment.Wrapper([None, lambda x: x])])
@pytest.mark.parametrize("asked", [{}, {"return_risk": True}], ids=["prediction", "risk"])
@pytest.mark.parametrize("name", CASES)
def test_other_wrappers_fill_them_once(name, asked, wrapper):
    build, make = CASES[name]
    model = build().eval()
    wrapped = wrapper(copy.deepcopy(model)).eval()
    if isinstance(wrapper, neo.Wrapper):
        wrapped.fit([((STEPS[0], make()), STEPS[0])])
    with torch.no_grad():
        try:
            y = stream(wrapped, make(), **asked)[0]
        except RuntimeError as error:
            refused = error
            assert name == "in_place"
        else:
            assert close(y, stream(model, make())[0])
            return
    assert "copy the input" in str(refused)


def test_voters_beside_a_density():
    wrapped = compose(vote.Wrapper(3), neo.Wrapper())(Appends()).eval().fit([((STEPS[0], []), STEPS[0])])
    with torch.no_grad():
        assert close(stream(wrapped, [], return_risk=True)[0], alone(wrapped, list).mean(0))


def test_rows_that_are_dealt_stay_with_their_voter():
    wrapped = vote.Wrapper(3)(Appends())
    kept = []
    y, _ = stream(wrapped, kept)
    expected = alone(wrapped, list)
    for voter, rows in enumerate(kept[0].rows):
        assert close(y[:, rows], expected[voter][:, rows])


def test_gradients_reach_each_voter_through_what_it_kept():
    wrapped = vote.Wrapper(3)(Appends())
    kept = []
    torch.stack([wrapped(x, kept, tile_and_reduce=True) for x in STEPS]).square().sum().backward()
    voters = wrapped.voters()
    torch.stack([stream(voter, [])[0] for voter in voters]).mean(0).square().sum().backward()
    weight = dict(wrapped.named_parameters())["k.weight@vote"].grad
    assert close(weight, torch.stack([voter.k.weight.grad for voter in voters]))


def test_what_is_kept_is_opaque_and_can_be_copied():
    wrapped = vote.Wrapper(3)(Appends()).eval()
    kept = []
    with torch.no_grad():
        stream(wrapped, kept, STEPS[:3])
        assert all(isinstance(part, BranchedState) for part in kept)
        with pytest.raises(TypeError, match=r"state\.map"):
            torch.stack(kept)
        expected = alone(wrapped, list)[:, 3].mean(0)
        for copied in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept)), list(kept)):
            assert close(wrapped(STEPS[3], copied), expected)
        del kept[0]
        expected = torch.stack([stream(voter.eval(), [], STEPS[1:4])[0][2] for voter in wrapped.voters()]).mean(0)
        assert close(wrapped(STEPS[3], kept), expected)


def test_what_is_the_same_for_all_stays_a_tensor():
    class Logs(Keeps):
        def keep(self, h, kept):
            kept["rows"] = torch.tensor(len(h))
            kept["trunk"] = h
            return h

    kept = {}
    with torch.no_grad():
        wrapped = vote.Wrapper(3, share=1)(Logs()).eval()
        wrapped(STEPS[0], kept)
        assert int(kept["rows"]) == 6
        assert close(kept["trunk"], wrapped.voters()[0].k(STEPS[0]))


def test_a_call_that_fails_leaves_them_as_they_were():
    class Fails(Keeps):
        def keep(self, h, kept):
            kept.append(h)
            raise ArithmeticError

    kept = []
    with pytest.raises(ArithmeticError):
        vote.Wrapper(3)(Fails()).eval()(STEPS[0], kept)
    assert kept == []


@pytest.mark.slow
def test_compiled_voters_fill_lists_of_their_own():
    wrapped = vote.Wrapper(2)(Appends()).eval()
    with torch.no_grad():
        wrapped(STEPS[0], [])
        expected = alone(wrapped, list).mean(0)
        assert close(stream(torch.compile(wrapped, backend="eager"), [])[0], expected)


# ---- tensors that forward writes into
class Writes(Keeps):
    def keep(self, h, kept):
        return kept.copy_(torch.tanh(kept + h))


class WritesInside(Keeps):
    def keep(self, h, kept):
        return kept["h"].copy_(torch.tanh(kept["h"] + h))


class WritesAndReturns(Writes):
    def forward(self, x, kept=None):
        return super().forward(x, kept), kept


@pytest.mark.parametrize("strategy", ["auto", "loop", "vmap"])
@pytest.mark.parametrize("build", [Writes, WritesInside])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tensor_that_each_branch_writes_another_way_is_refused(build, training, strategy, mode):
    wrapped = vote.Wrapper(3, strategy=strategy)(build()).train(training)
    with mode():
        kept = torch.zeros(6, 8)
        with pytest.raises(RuntimeError, match=r"a tensor \[6, 8\], in place.* wrap with state="):
            wrapped(STEPS[0], kept if build is Writes else {"h": kept}, tile_and_reduce=True)
        assert not kept.any()


class WritesAfterTheTrunk(nn.Module):
    """Adds to what the trunk gave, in place, as a residual block may."""

    def __init__(self):
        super().__init__()
        self.trunk, self.middle, self.head = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        h += torch.sin(self.middle(h))
        return self.head(h)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tensor_that_a_shared_trunk_writes_is_right(mode):
    wrapped = vote.Wrapper(3, share=1)(Writes()).eval()
    with mode():
        expected = alone(wrapped, lambda: torch.zeros(6, 8))
        for _ in range(3):
            assert close(stream(wrapped, torch.zeros(6, 8))[0], expected.mean(0))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("share", [None, 1, 2, "rank1"])
def test_a_write_into_what_the_trunk_gave_is_right(share, mode):
    wrapped = vote.Wrapper(3, share=share)(WritesAfterTheTrunk()).eval()
    with mode():
        expected = torch.stack([voter.eval()(STEPS[0]) for voter in wrapped.voters()])
        for _ in range(3):
            y, risk = wrapped(STEPS[0], return_risk=True)
            assert close(y, expected.mean(0))
            assert close(risk, expected.std(0, correction=0))


def test_data_made_in_inference_mode_may_be_written_into_once():
    class Centres(nn.Linear):
        def forward(self, x):
            return super().forward(x.sub_(1))

    wrapped = vote.Wrapper(3)(Centres(2, 2)).eval()
    with torch.inference_mode():
        for _ in range(4):
            x = STEPS[0].clone()
            expected = torch.stack([voter.eval()(x.clone()) for voter in wrapped.voters()])
            assert close(wrapped(x), expected.mean(0))
            assert torch.equal(x, STEPS[0] - 1)


def test_a_tensor_that_is_returned_as_state():
    wrapped = vote.Wrapper(3, state=1)(WritesAndReturns()).eval()
    with torch.no_grad():
        kept = initial = torch.zeros(6, 8)
        ys = []
        for x in STEPS:
            y, kept = wrapped(x, kept)
            ys.append(y)
        expected = []
        for voter in wrapped.voters():
            state = torch.zeros(6, 8)
            expected.append(torch.stack([voter.eval()(x, state)[0] for x in STEPS]))
        assert close(torch.stack(ys), torch.stack(expected).mean(0))
        with pytest.raises(ValueError, match="written in place by an earlier call"):
            wrapped(STEPS[0], initial)
        wrapped(STEPS[0], initial.zero_())


def test_data_that_is_written_into_is_refused_where_it_comes_back():
    class Moves(nn.Linear):
        def forward(self, x):
            return x.add_(super().forward(x)) * 1

    wrapped, x = vote.Wrapper(3)(Moves(2, 2)).eval(), STEPS[0].clone()
    with torch.no_grad():
        expected = torch.stack([voter.eval()(x.clone()) for voter in wrapped.voters()]).mean(0)
        assert close(wrapped(x), expected)
        with pytest.raises(ValueError, match=r"x = x\.clone\(\)"):
            wrapped(x)
