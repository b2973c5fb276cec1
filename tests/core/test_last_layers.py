"""The last layers are those that run last on the way to each output, whatever their order of registration."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import workbench
from workbench import compose, sample, sculpt, vote
from workbench.errors import WorkbenchWarning


class HeadFirst(nn.Module):
    """Registered in another order than it runs."""

    def __init__(self):
        super().__init__()
        self.head, self.a, self.b = nn.Linear(8, 1), nn.Linear(2, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.b(self.a(x).tanh()).tanh())


class Segmentation(nn.Module):
    """A main and an auxiliary head, as torchvision has them."""

    def __init__(self, training_only=False):
        super().__init__()
        self.training_only = training_only
        self.backbone = nn.Conv2d(3, 8, 1)
        self.classifier = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1))
        self.aux = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        h = self.backbone(x).relu()
        out = {"out": self.classifier(h)}
        if self.training or not self.training_only:
            out["aux"] = self.aux(h)
        return out


class Twice(nn.Module):
    """One layer at the beginning and again at the end."""

    def __init__(self):
        super().__init__()
        self.tied, self.b, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.tied(self.b(self.tied(x).tanh()).tanh())


class WithState(nn.Module):
    """Hidden states, and a scalar, beside the answer."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = self.body(x)
        y = self.head(h)
        return {"hidden": h, "y": y, "loss": y.square().mean()}


class Pieces(nn.Module):
    """What runs last is written into a part of the output; its weight is read in transposed form."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Parameter(torch.randn(1, 4)), nn.Linear(2, 4)

    def forward(self, x):
        out = x.new_zeros(len(x), 2)
        h = self.first(x)
        out[:, :1] = h @ self.last.T
        out[:, 1].add_(h.sum(1))
        return out


def names(wrapped):
    return {name.partition("@")[0] for name, _ in wrapped.named_risk_parameters()}


HEADS = {"aux.weight", "aux.bias", "classifier.3.weight", "classifier.3.bias"}


@pytest.mark.parametrize(
    ("model", "x", "n", "expected"),
    [
        (HeadFirst, torch.randn(4, 2), 1, {"head.weight", "head.bias"}),
        (HeadFirst, torch.randn(4, 2), 2, {"head.weight", "head.bias", "b.weight", "b.bias"}),
        (Segmentation, torch.randn(2, 3, 4, 4), 1, HEADS),
        (lambda: Segmentation(True), torch.randn(2, 3, 4, 4), 1, HEADS - {"aux.weight", "aux.bias"}),
        (Twice, torch.randn(4, 4), 1, {"tied.weight", "tied.bias"}),
        (WithState, torch.randn(4, 2), 1, {"head.weight", "head.bias"}),
        (Pieces, torch.randn(4, 2), 1, {"last"}),
    ],
)
@pytest.mark.parametrize("wrapper", [vote.Wrapper, sculpt.Wrapper])
def test_an_example_shows_which_layers_are_the_last(model, x, n, expected, wrapper):
    torch.manual_seed(0)
    model = model()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    options = {"share": n} if wrapper is vote.Wrapper else {"n_layers": n}
    # the second column of Pieces does not depend on the last layer; a risk head that starts at its weights does not show it yet
    left_out = isinstance(model, Pieces) and wrapper is vote.Wrapper
    with pytest.warns(WorkbenchWarning, match="at 1 of dimension 1") if left_out else contextlib.nullcontext():
        wrapped = wrapper(example=x, **options)(model)
    assert names(wrapped) == expected
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    wrapped.eval()(x, return_risk=True)  # nothing more to tell


def test_voters_of_a_head_that_is_registered_first():
    torch.manual_seed(0)
    model, x = HeadFirst(), torch.randn(6, 2)
    wrapped = vote.Wrapper(3, share=1, example=x)(model).eval()
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    assert all(torch.equal(voter.b.weight, model.b.weight) for voter in wrapped.voters())
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))


def test_where_the_order_agrees_an_example_changes_no_number():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)
    )
    for wrapper in (vote.Wrapper(3, share=2), sculpt.Wrapper(n_layers=2), compose(vote.Wrapper(2), sculpt.Wrapper())):
        torch.manual_seed(1)
        without = wrapper(model).state_dict()
        torch.manual_seed(1)
        shown = wrapper.with_options(example=torch.randn(4, 2, generator=torch.Generator()))(model).state_dict()
        assert without.keys() == shown.keys()
        assert all(torch.equal(value, shown[key]) for key, value in without.items())


def test_without_an_example_the_first_call_tells():
    x = torch.randn(4, 2)
    late = vote.Wrapper(3, share=1)(HeadFirst()).eval()  # b votes, head runs after it
    with pytest.warns(WorkbenchWarning, match=r"share=1 took b for the last layers.*after them: head.*example=x"):
        late(x)
    late(x)
    for wrapped in (vote.Wrapper(3, share=1)(Segmentation()), sculpt.Wrapper(n_layers=1)(Segmentation())):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"output\['out'\] does not depend on them.*classifier\.3.*example=x"):
                wrapped(torch.randn(2, 3, 4, 4), return_risk=True)
    with pytest.warns(WorkbenchWarning, match="after them: tied"):
        vote.Wrapper(3, share=2)(Twice())(torch.randn(4, 4))
    for wrapped in (
        vote.Wrapper(3, share=1)(WithState()),
        sculpt.Wrapper(n_layers=1)(WithState()),
        vote.Wrapper(3)(HeadFirst()),
        vote.Wrapper(3, share=3)(HeadFirst()),
    ):
        wrapped.eval()(x, return_risk=True)  # nothing to tell


def test_the_look_leaves_no_trace():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.drop, self.b = nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.b(self.drop(self.norm(self.a(x))))

    torch.manual_seed(0)
    x, model = torch.randn(8, 2), Counts()
    shown, told = (vote.Wrapper(2, share=1, **options)(copy.deepcopy(model)) for options in ({"example": x}, {}))
    told.load_state_dict(shown.state_dict())
    answers = []
    for wrapped in (shown, told):
        torch.manual_seed(1)
        answers.append((wrapped(x, tile_and_reduce=True), wrapped(x, tile_and_reduce=True), torch.rand(1)))
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)
    assert told.calls == 2
    assert told.norm.num_batches_tracked == 2
    assert torch.equal(told.norm.running_mean, shown.norm.running_mean)


@pytest.mark.parametrize("at", ["inner", None])
def test_a_part_of_a_model(at):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.inner = nn.Linear(3, 2), HeadFirst()

        def forward(self, x):
            return self.inner(self.before(x))

    wrapped = vote.Wrapper(2, share=1, example=torch.randn(4, 3))(Outer(), at=at)
    voting = names(wrapped if at is None else wrapped.inner)
    assert {name.removeprefix("inner.") for name in voting} == {"head.weight", "head.bias"}


def test_classes_and_files_keep_the_order(tmp_path):
    x = torch.randn(4, 2)
    decorated = vote.Wrapper(2, share=1, example=x)(HeadFirst)()
    assert names(decorated) == {"head.weight", "head.bias"}
    wrapped = compose(vote.Wrapper(2, share=1, example=x), sculpt.Wrapper(n_layers=2))(HeadFirst()).eval()
    workbench.save(wrapped, tmp_path / "model.safetensors")
    loaded = workbench.load(tmp_path / "model.safetensors", HeadFirst()).eval()
    assert names(loaded) == names(wrapped)
    torch.testing.assert_close(loaded(x, return_risk=True)[1].total, wrapped(x, return_risk=True)[1].total)
    both = sample.Wrapper()(wrapped)
    assert both.eval()(x).shape == (4, 1)
