"""Models that write into their parameters in forward: equal to plain copies, or refused with what to write."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from helpers import random_models
from helpers.zoo import Case
from torch import nn

from workbench import compose, sample, sculpt, vote


class ActNorm(nn.Module):
    """Shift and scale that are made of the first batch, as in flows."""

    def __init__(self, written: str, flag: str) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        self.written = written
        if flag == "buffer":
            self.register_buffer("ready", torch.tensor(False))
        else:
            self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            shift, scale = -x.detach().mean(0), 1 / x.detach().std(0)
            if self.written == "random":
                shift = torch.randn(4)
            if self.written == "no_grad":
                with torch.no_grad():
                    self.shift.copy_(shift)
            else:
                self.shift.data.copy_(shift)
            if self.written == "set_data":
                self.scale.data = scale
            else:
                self.scale.data.copy_(scale)
            self.ready = self.ready | True
        return (x + self.shift) * self.scale


def net(written: str, flag: str) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), ActNorm(written, flag), nn.Tanh(), nn.Linear(4, 1))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, 3)


@pytest.mark.parametrize("flag", ["buffer", "attribute"])
@pytest.mark.parametrize("share", [None, 1])
def test_what_every_branch_writes_alike_is_right(flag: str, share: int | None, x: torch.Tensor) -> None:
    wrapped = vote.Wrapper(3, share=share)(net("data", flag)).eval()
    copies = [copy.deepcopy(voter) for voter in wrapped.voters()]
    for _ in range(2):
        torch.testing.assert_close(wrapped(x), torch.stack([voter(x) for voter in copies]).mean(0))
        torch.testing.assert_close(wrapped(x), torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))


@pytest.mark.parametrize("flag", ["buffer", "attribute"])
@pytest.mark.parametrize("training", [False, True])
def test_what_would_be_gone_after_the_call_is_refused(flag: str, training: bool, x: torch.Tensor) -> None:
    wrapped = vote.Wrapper(3)(net("set_data", flag)).train(training)
    with pytest.raises(RuntimeError, match=r"sets the \.data of its parameter '1\.scale'.*call the model once"):
        wrapped(x, tile_and_reduce=True)


def test_what_branches_write_differently_into_a_parameter_that_they_share_is_refused(x: torch.Tensor) -> None:
    wrapped = vote.Wrapper(3, share=1)(net("random", "buffer")).eval()
    with pytest.raises(
        RuntimeError, match=r"writes into its parameter '1\.shift' in evaluation mode.*call the model once"
    ):
        wrapped(x)


def test_writes_that_torch_counts_into_shared_parameters_are_refused_with_what_to_do(x: torch.Tensor) -> None:
    wrapped = vote.Wrapper(3, share=1)(net("no_grad", "buffer")).eval()
    with pytest.raises(RuntimeError, match=r"forward of Sequential.* writes into .*parameter.*call the model once"):
        wrapped(x)


@pytest.mark.parametrize("written", ["no_grad", "set_data", "random"])
def test_called_once_before_wrapping_all_of_them_are_right(written: str, x: torch.Tensor) -> None:
    model = net(written, "buffer")
    model(x)
    wrapped = vote.Wrapper(3)(model).eval()
    torch.testing.assert_close(wrapped(x), torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))


class Casting(nn.Module):
    """Casts a layer in every call, as routers of mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer = self.layer.to(torch.float32)
        return self.layer(x.float())


def test_a_layer_that_is_cast_in_every_call_is_right(x: torch.Tensor) -> None:
    wrapped = vote.Wrapper(3)(Casting().double()).train()
    copies = [copy.deepcopy(voter) for voter in wrapped.voters()]
    prediction = wrapped(x, tile_and_reduce=True)
    torch.testing.assert_close(prediction, torch.stack([voter(x) for voter in copies]).mean(0))
    prediction.sum().backward()
    grads = torch.stack([torch.full((1, 3), 1 / 3) * x.sum(0) for _ in copies])
    torch.testing.assert_close(wrapped.get_parameter("layer.weight@vote").grad, grads.double())


class Remembering(nn.Module):
    """Computes its scale once and keeps it, as Gaussian processes keep a factorization."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in self.kept:
            self.kept["scale"] = self.layer.weight.detach().norm()
        return self.layer(x) / self.kept["scale"]


def test_voters_have_the_attributes_of_their_own_branches(x: torch.Tensor) -> None:
    wrapped = vote.Wrapper(3)(Remembering()).eval()
    before = [copy.deepcopy(voter) for voter in wrapped.voters()]
    prediction, risk = wrapped(x, return_risk=True)
    after = wrapped.voters()
    for voters in (before, after):
        outputs = torch.stack([voter(x) for voter in voters])
        torch.testing.assert_close(prediction, outputs.mean(0))
        torch.testing.assert_close(risk, outputs.std(0, unbiased=False))
    assert len({float(voter.kept["scale"]) for voter in after}) == 3
    wrapped.kept = {"scale": torch.tensor(2.0)}  # what a user sets holds for all
    assert [float(voter.kept["scale"]) for voter in wrapped.voters()] == [2.0] * 3


class Irreps(tuple):
    """As e3nn's: a tuple that has no length."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_an_attribute_that_is_a_tuple_without_a_length_is_none_of_our_business(x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].irreps = Irreps([1, 2])
    wrapped = vote.Wrapper(3)(model).eval()
    torch.testing.assert_close(wrapped(x), torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))


class Teacher(nn.Module):
    """A frozen copy that follows the layers which learn, moved in forward, as in BYOL and MoCo."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.student, self.how = nn.Linear(3, 4), how
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for new, old in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            if self.how == "set_data":
                old.data = 0.9 * old.data + 0.1 * new.data
            elif self.how == "in_place":
                old.mul_(0.9).add_(new, alpha=0.1)
            elif self.how == "operator":
                old.data *= 0.9
                old.data += 0.1 * new.data
            elif self.how == "slice":
                old[:2] = 0.9 * old[:2] + 0.1 * new[:2]
            else:
                torch.add(0.9 * old, new, alpha=0.1, out=old)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.follow()
        return (self.student(x) - self.teacher(x)).square().mean(1)


@pytest.mark.parametrize("how", ["set_data", "in_place", "operator", "slice", "out"])
def test_a_refused_write_leaves_the_given_model_as_it_was(how: str, x: torch.Tensor) -> None:
    model = Teacher(how)
    before = copy.deepcopy(model.state_dict())
    wrapped = vote.Wrapper(3)(model).train()
    with pytest.raises(RuntimeError, match=r"writes into its parameter 'teacher\.weight'"):
        wrapped(x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class MovingTarget(nn.Module):
    """A target that follows by moving averages, which forward writes into it, as BYOL does."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.online, self.target, self.write = nn.Linear(3, 2), nn.Linear(3, 2), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for mine, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    self.write(mine, other)
        return self.online(x) * self.target(x)


@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
@pytest.mark.parametrize(
    "write",
    [
        lambda mine, other: mine.data.mul_(0.9).add_(other.data, alpha=0.1),
        lambda mine, other: mine.data.copy_(0.9 * mine.data + 0.1 * other.data),
        lambda mine, other: setattr(mine, "data", 0.9 * mine.data + 0.1 * other.data),
        lambda mine, other: mine.mul_(0.9).add_(other, alpha=0.1),
    ],
    ids=["in place", "copied", "replaced", "past data"],
)
def test_what_forward_writes_into_products_is_refused(write: Any, strategy: Any) -> None:
    wrapped, x = vote.Wrapper(3, share="rank1", strategy=strategy)(MovingTarget(write)), torch.randn(6, 3)
    wrapped.eval()(x)
    with pytest.raises(RuntimeError, match=r"target\.(weight|bias)|into a parameter"):
        wrapped.train()(x, return_risk=True)


@torch.no_grad()
def follow(target: torch.Tensor, online: torch.Tensor) -> None:
    target.lerp_(online, 0.1)


class Following(nn.Module):
    """A target that follows by moving averages, which forward writes into it in one of several ways, as BYOL does."""

    def __init__(self, selects: bool = False) -> None:
        super().__init__()
        self.online, self.target, self.selects = nn.Linear(3, 2), nn.Linear(3, 2), selects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.write(self.target.weight, self.online.weight)
        y = self.online(x) * self.target(x)
        return y[y.detach().isfinite().all(1).nonzero()[:, 0]] if self.selects else y


class ByMethod(Following):
    @torch.no_grad()
    def write(self, target: torch.Tensor, online: torch.Tensor) -> None:
        target.mul_(0.9).add_(online, alpha=0.1)


class ByOperator(Following):
    def write(self, target: torch.Tensor, online: torch.Tensor) -> None:
        with torch.no_grad():
            target *= 0.9
            target += 0.1 * online


class ByItems(Following):
    def write(self, target: torch.Tensor, online: torch.Tensor) -> None:
        with torch.no_grad():
            target[:1] = 0.5 * (target[:1] + online[:1])


class ByView(Following):
    def write(self, target: torch.Tensor, online: torch.Tensor) -> None:
        with torch.no_grad():
            target.detach()[:1].copy_(0.5 * (target[:1] + online[:1]))


class ByList(Following):
    @torch.no_grad()
    def write(self, target: torch.Tensor, online: torch.Tensor) -> None:
        torch._foreach_lerp_([target], [online], 0.1)


class ByOut(Following):
    @torch.no_grad()
    def write(self, target: torch.Tensor, online: torch.Tensor) -> None:
        assert torch.lerp(target, online, 0.1, out=target) is target


class ByData(Following):
    def write(self, target: torch.Tensor, online: torch.Tensor) -> None:
        target.data.mul_(0.9).add_(online.data, alpha=0.1)


class ByHelper(Following):
    def write(self, target: torch.Tensor, online: torch.Tensor) -> None:
        follow(target, online)


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop", "tune"])
@pytest.mark.parametrize("cls", Following.__subclasses__())
def test_writes_into_voters_own_parameters_are_those_of_plain_copies(
    cls: Any, strategy: Any, selects: bool, x: torch.Tensor
) -> None:
    wrapped = vote.Wrapper(5, strategy=strategy)(cls(selects)).train()
    if strategy == "vmap":
        before = wrapped.get_parameter("target.weight@vote").clone()
        with contextlib.suppress(RuntimeError):  # not possible for most
            _assert_trains_as_plain_copies(wrapped, x, torch.zeros(8, 2))
            return
        assert torch.equal(wrapped.get_parameter("target.weight@vote"), before)
        return
    _assert_trains_as_plain_copies(wrapped, x, torch.zeros(8, 2))


class Bounded(nn.Module):
    """Users and items whose vectors have norms of 1 at most, which torch sees to in forward, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.items = nn.Embedding(6, 3, max_norm=1.0), nn.EmbeddingBag(6, 3, max_norm=0.5, norm_type=1.0)
        self.hidden, self.last = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden(torch.cat([self.user(user), self.items(items)], 1)).tanh())


@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop", "tune"])
@pytest.mark.parametrize("share", [None, 1])
def test_embeddings_of_bounded_norm_are_those_of_plain_copies(share: int | None, strategy: Any) -> None:
    wrapped = vote.Wrapper(3, share=share, strategy=strategy)(Bounded()).train()
    inputs = (torch.randint(0, 6, (8,)), torch.randint(0, 6, (8, 2)))
    if strategy == "vmap" and share is None:
        with pytest.raises(RuntimeError, match="not possible for Bounded"):
            wrapped(*inputs, tile_and_reduce=True)
        return
    _assert_trains_as_plain_copies(wrapped, inputs, torch.zeros(8, 1))


class BoundedByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.last = nn.Parameter(torch.randn(6, 3)), nn.Linear(3, 1)

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.embedding(user, self.users, max_norm=1.0))


def test_rows_of_a_parameter_that_a_function_bounds_are_those_of_plain_copies() -> None:
    wrapped = vote.Wrapper(3)(BoundedByFunction()).train()
    _assert_trains_as_plain_copies(wrapped, torch.randint(0, 6, (8,)), torch.zeros(8, 1))


def test_a_write_that_no_class_shows_is_refused_again_and_again(x: torch.Tensor) -> None:
    write = lambda target, online: target.mul_(0.9).add_(online, alpha=0.1)  # noqa: E731
    wrapped = vote.Wrapper(3)(MovingTarget(write)).train()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="forward of MovingTarget writes into a parameter"):
            wrapped(x, tile_and_reduce=True)


@pytest.mark.parametrize("wrapper", random_models.WRAPPERS)
def test_every_wrapper_takes_embeddings_of_bounded_norm(wrapper: str) -> None:
    def inputs(seed: int = 0, rows: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(0, 6, size, generator=generator) for size in ((rows,), (rows, 2))), {}

    random_models.check(Case("bounded", Bounded, inputs, frozenset()), wrapper)


class Deep(ByData):
    """Its target is in the trunk, which the voter and its risk head share."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(super().forward(x))


@pytest.mark.parametrize("other", [sculpt.Wrapper(n_layers=1), sample.Wrapper(3)])
def test_a_write_into_what_several_branches_of_a_voter_share_is_refused(other: Any, x: torch.Tensor) -> None:
    wrapped = compose(vote.Wrapper(2, strategy="loop"), other)(Deep()).train()
    before = copy.deepcopy(wrapped.state_dict())
    with pytest.raises(RuntimeError, match=r"writes into its parameter 'target\.weight', which several branches share"):
        wrapped(x, return_risk=True, tile_and_reduce=True)
    torch.testing.assert_close(wrapped.state_dict(), before, rtol=0, atol=0)


def _assert_trains_as_plain_copies(wrapped: Any, inputs: Any, y: torch.Tensor) -> None:
    """Compare losses of three steps, and then predictions, with those of plain copies that share what the voters share."""
    copies = [copy.deepcopy(voter) for voter in wrapped.voters()]
    shared = {name for name, _ in wrapped.named_parameters() if "@vote" not in name}
    for name, parameter in copies[0].named_parameters():
        if name in shared:
            for other in copies[1:]:
                path, _, attribute = name.rpartition(".")
                setattr(other.get_submodule(path), attribute, parameter)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    optimizers = [
        torch.optim.SGD(wrapped.parameters(), 0.5),
        torch.optim.SGD({p for voter in copies for p in voter.parameters()}, 0.5),
    ]
    for _ in range(3):
        loss = wrapped.loss(nn.functional.mse_loss, inputs, y)
        expected = torch.stack([nn.functional.mse_loss(voter(*args), y) for voter in copies]).mean()
        torch.testing.assert_close(loss, expected)
        for optimizer, value in zip(optimizers, (loss, expected), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    wrapped.eval()
    for voter, plain in zip(wrapped.voters(), copies, strict=True):
        torch.testing.assert_close(voter.state_dict(), plain.state_dict())
    with torch.no_grad():
        expected = torch.stack([voter.eval()(*args) for voter in copies]).mean(0)
        for _ in range(3):
            torch.testing.assert_close(wrapped(*args), expected)


class Frozen(nn.Module):
    """Freezes its trunk in forward, as models do that warm up their head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trunk.requires_grad_(False)
        return self.head(torch.tanh(self.trunk(x)))


def test_a_voters_parameter_that_forward_freezes_is_refused_and_a_shared_one_frozen() -> None:
    with pytest.raises(RuntimeError, match="forward of Frozen freezes a parameter"):
        vote.Wrapper(2)(Frozen())(torch.randn(4, 3))
    wrapped = vote.Wrapper(2, share=1)(Frozen())
    wrapped(torch.randn(4, 3)).sum().backward()
    assert [name for name, parameter in wrapped.named_parameters() if parameter.grad is None] == [
        "trunk.weight",
        "trunk.bias",
    ]
