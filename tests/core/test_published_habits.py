"""Idioms of published models: loss terms kept on the model, norms frozen in forward, layers in plain lists, averages in parameters."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from workbench import WorkbenchWarning, compose, neo, sample, sculpt, vote

VOTERS = 3


def own_tensors(wrapped: Any, voter: int, plain: nn.Module) -> nn.Module:
    """A plain model, built by itself, with the tensors that a voter has by the names of their keys."""
    state = {**dict(nn.Module.named_parameters(wrapped)), **dict(nn.Module.named_buffers(wrapped))}
    with torch.no_grad():
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            tensor.copy_(state[f"{name}@vote"][voter] if f"{name}@vote" in state else state[name])
    return plain


# ---- terms of a loss in attributes -----------------------------------------------------------------------------------


class Experts(nn.Module):
    """A mixture of experts that leaves its balancing term to the caller, and runs each expert on the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate = nn.Linear(5, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))
        self.aux_loss: Any = 0.0
        self.terms: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        weights, chosen = self.gate(h).softmax(-1).topk(2)
        self.aux_loss = self.gate(h).softmax(-1).mean(0).square().sum()
        self.terms = [h.square().mean(), weights.std()]
        out = h.new_zeros(len(h), 2)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out = out.index_add(0, rows, weights[rows, slot, None] * expert(h[rows]))
        return out


def whole_loss(model: Any, y: Tensor) -> Tensor:
    return y.square().mean() + model.aux_loss + 0.1 * sum(model.terms)


@pytest.mark.parametrize("way", ["loss", "call"])
@pytest.mark.parametrize("share", [None, 1])
def test_terms_of_a_loss_that_a_model_keeps_train_every_voter(share: int | None, way: str) -> None:
    x = torch.randn(9, 5)
    wrapped: Any = vote.Wrapper(VOTERS, share=share)(Experts()).train()
    plain: list[Any] = [own_tensors(wrapped, i, Experts()) for i in range(VOTERS)]
    if way == "loss":
        loss = wrapped.loss(lambda y, target: whole_loss(wrapped, y), x, torch.zeros(9, 2))
        expected = torch.stack([whole_loss(model, model(x)) for model in plain]).mean()
    else:  # the author's own loop
        loss = whole_loss(wrapped, wrapped(x, tile_and_reduce=True))
        mean = torch.stack([model(x) for model in plain]).mean(0)
        kept = torch.stack([model.aux_loss + 0.1 * sum(model.terms) for model in plain]).mean()
        expected = mean.square().mean() + kept
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in wrapped.named_parameters():
        slot = name.removesuffix("@vote")
        grads = torch.stack([model.get_parameter(slot).grad for model in plain])
        torch.testing.assert_close(parameter.grad, grads if slot != name else grads.sum(0), msg=name)


def test_dealt_rows_leave_the_mean_of_the_voters_terms() -> None:
    wrapped: Any = vote.Wrapper(VOTERS)(Experts()).train()
    wrapped(torch.randn(9, 5))
    wrapped.aux_loss.backward()
    grad = dict(wrapped.named_parameters())["gate.weight@vote"].grad
    assert (grad.flatten(1).abs().sum(1) > 0).all()


def test_a_term_beside_risk_heads_is_the_models_own() -> None:
    x, model = torch.randn(9, 5), Experts()
    wrapped: Any = sculpt.Wrapper(n_layers=1)(model).train()
    plain: Any = copy.deepcopy(model)
    plain(x)
    wrapped(x, return_risk=True)
    torch.testing.assert_close(wrapped.aux_loss, plain.aux_loss)


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 2)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.a(x))
        return self.b(self.hidden)


def test_a_loss_of_a_kept_tensor_is_told_and_nothing_else() -> None:
    wrapped: Any = vote.Wrapper(VOTERS)(Kept()).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", WorkbenchWarning)
        wrapped(torch.randn(6, 5)).sum().backward()
    with pytest.warns(WorkbenchWarning, match="uses the attribute hidden of Kept"):
        (wrapped(torch.randn(6, 5)).sum() + wrapped.hidden.square().mean()).backward()


class Regularized(nn.Module):
    """Keeps its penalty in a buffer, as embeddings of pykeen do, which another library adds to the loss."""

    def __init__(self, persistent: bool = True, kept: str = "penalty") -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.register_buffer("penalty", torch.zeros(()), persistent=persistent)
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))
        setattr(self, self.kept, h.square().mean())
        return self.head(h)


@pytest.mark.parametrize(
    "wrapper", [vote.Wrapper(3), vote.Wrapper(3, share=1), vote.Wrapper(3, strategy="loop"), sculpt.Wrapper()]
)
@pytest.mark.parametrize("persistent", [True, False])
def test_a_term_of_a_loss_in_a_buffer_is_told(persistent: bool, wrapper: Any) -> None:
    x, wrapped = torch.randn(12, 3), wrapper(Regularized(persistent)).train()
    with pytest.warns(
        WorkbenchWarning, match="tensor with gradients in the buffer 'penalty', of which only the numbers"
    ):
        wrapped(x, tile_and_reduce=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            wrapped(x)
        other = wrapper(Regularized(kept="attribute")).train()  # as the warning says
        other(x, tile_and_reduce=True)
    assert other.attribute.requires_grad


# ---- norms that forward freezes --------------------------------------------------------------------------------------


class Freezes(nn.Module):
    """Freezes the statistics of its norm in its second call, and says so nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.norm.eval()
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("strategy", ["auto", "loop", "vmap"])
def test_norms_that_forward_freezes_stay_frozen(strategy: Any) -> None:
    wrapped: Any = vote.Wrapper(VOTERS, strategy=strategy)(Freezes()).train()
    plain = [own_tensors(wrapped, i, Freezes()) for i in range(VOTERS)]
    for call in range(4):
        x = torch.randn(9, 5)
        y = wrapped(x, tile_and_reduce=True)
        torch.testing.assert_close(y, torch.stack([model(x) for model in plain]).mean(0))
        assert wrapped.norm.training is (call == 0)
    assert wrapped.training
    wrapped.train()
    assert wrapped.norm.training


class KeepsNormsFrozen(nn.Module):
    """As detectors do: `train` leaves norms in evaluation mode, though they were made in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def test_the_models_own_train_is_called_also_where_all_is_in_that_mode() -> None:
    wrapped: Any = vote.Wrapper(VOTERS)(KeepsNormsFrozen())
    assert wrapped.norm.training  # as it was made
    wrapped.train()
    assert not wrapped.norm.training
    x = torch.randn(9, 5)
    plain = [own_tensors(wrapped, i, KeepsNormsFrozen()).train() for i in range(VOTERS)]
    torch.testing.assert_close(wrapped(x, tile_and_reduce=True), torch.stack([model(x) for model in plain]).mean(0))


class Merging(nn.Linear):
    """A layer of LoRA as in loralib: merges its factors into the frozen weight in evaluation mode."""

    def __init__(self, features: int, out: int, merge_weights: bool = True) -> None:
        super().__init__(features, out)
        self.weight.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, features)), nn.Parameter(torch.randn(out, 2))
        self.merges, self.merged = merge_weights, False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.merges and self.merged is mode:
            self.weight.data += (-1 if mode else 1) * (self.lora_b @ self.lora_a)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.0 if self.merged else x @ self.lora_a.T @ self.lora_b.T)


@pytest.mark.parametrize("share", [None, 1])
def test_weights_that_are_merged_when_the_mode_changes_are_refused_unchanged(share: int | None) -> None:
    model = nn.Sequential(Merging(5, 8), nn.Tanh(), Merging(8, 2))
    before, x = copy.deepcopy(model.state_dict()), torch.randn(6, 5)
    wrapped: Any = vote.Wrapper(VOTERS, share=share)(model)
    with pytest.raises(RuntimeError, match="Switch the merging off"):
        wrapped.eval()
    assert wrapped.training
    assert not any(layer.merged for layer in (wrapped[0], wrapped[2], model[0], model[2]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    y = wrapped(x, tile_and_reduce=True)
    torch.testing.assert_close(y, torch.stack([voter.eval()(x) for voter in wrapped.voters()]).mean(0))
    plain = nn.Sequential(Merging(5, 8, merge_weights=False), nn.Tanh(), Merging(8, 2, merge_weights=False))
    unmerged: Any = vote.Wrapper(VOTERS)(plain).eval()
    torch.testing.assert_close(unmerged(x), torch.stack([voter(x) for voter in unmerged.voters()]).mean(0))
    noisy: Any = sample.Wrapper(2, where="inputs")(copy.deepcopy(model)).eval()  # whose branches have the same weights
    assert noisy[0].merged


class GivesItsInput(nn.Module):
    """As Siren is published: hands out the coordinates, which are to be differentiated by."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().detach().requires_grad_(True)
        return self.net(x), x


def test_an_input_that_is_handed_out_with_gradients_is_asked_first_without() -> None:
    x, wrapped = torch.randn(6, 2), vote.Wrapper(VOTERS)(GivesItsInput()).eval()
    with torch.no_grad():
        y, handed_out = wrapped(x)
    torch.testing.assert_close(y, torch.stack([voter(x)[0] for voter in wrapped.voters()]).mean(0))
    torch.testing.assert_close(handed_out, x)


# ---- layers in plain lists -------------------------------------------------------------------------------------------


class Stacks(nn.Module):
    """As N-BEATS is published: layers in lists of lists, of which only the parameters are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = [[nn.Linear(4, 4), nn.Linear(4, 4)], [nn.Sequential(nn.Linear(4, 4), nn.ReLU())]]
        self.pairs = ((nn.Linear(4, 2),),)
        self.held = nn.ParameterList(p for stack in [*self.stacks, *self.pairs] for m in stack for p in m.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            for layer in stack:
                x = x + layer(x)
        return self.pairs[0][0](x)


@pytest.mark.parametrize("share", [None, "rank1"])
def test_layers_in_lists_of_lists_vote(share: Any) -> None:
    x, model = torch.randn(6, 4), Stacks()
    before = copy.deepcopy(model.state_dict())
    wrapped: Any = vote.Wrapper(VOTERS, share=share)(model).eval()
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    assert (answers[0] - answers[1]).abs().min() > 0
    for asked in (wrapped, copy.deepcopy(wrapped)):
        y, risk = asked(x, return_risk=True)
        torch.testing.assert_close(y, answers.mean(0))
        torch.testing.assert_close(risk, answers.std(0, correction=0))
    if share is None:
        plain = [own_tensors(wrapped, i, Stacks()) for i in range(VOTERS)]
        torch.testing.assert_close(answers, torch.stack([one(x) for one in plain]))
    y.sum().backward()
    assert all(p.grad is not None for p in asked.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# ---- parameters that forward makes anew ------------------------------------------------------------------------------


class Codes(nn.Module):
    """A code book that is a moving average, put into a parameter anew in each call, as in published VQ-VAEs."""

    def __init__(self, learns: bool = True) -> None:
        super().__init__()
        self.into, self.codes, self.out = nn.Linear(5, 4), nn.Embedding(6, 4), nn.Linear(4, 2)
        self.codes.weight.requires_grad_(learns)

    def forward(self, x: Tensor) -> Tensor:
        z = self.into(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(1)
        if self.training:
            share = F.one_hot(nearest, 6).to(z.dtype)
            self.codes.weight = nn.Parameter(0.9 * self.codes.weight + 0.1 * share.T @ z.detach(), requires_grad=False)
        return self.out(z + (self.codes(nearest) - z).detach())


@pytest.mark.parametrize("learns", [True, False])
def test_a_parameter_that_forward_makes_anew_is_refused(learns: bool) -> None:
    model = Codes(learns)
    before = copy.deepcopy(model.state_dict())
    wrapped: Any = vote.Wrapper(VOTERS)(model).train()
    with pytest.raises(
        RuntimeError, match=r"'codes\.weight' by another tensor, which would be lost .*register_buffer\('weight'"
    ):
        wrapped(torch.randn(6, 5))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert wrapped.eval()(torch.randn(6, 5)).shape == (6, 2)  # there it does not


class Ties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        self.out.weight = self.words.weight
        return self.out(self.words(ids))


def test_parameters_that_are_tied_in_forward_are_refused_with_what_to_write() -> None:
    wrapped: Any = vote.Wrapper(VOTERS)(Ties()).eval()
    with pytest.raises(RuntimeError, match="Tie them in __init__"):
        wrapped(torch.zeros(2, 3, dtype=torch.long))


HANDED_OUT: dict[str, nn.Parameter] = {}


class FromTable(nn.Module):
    """Takes its parameter from a table by name, as modules of pyro do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(5, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = HANDED_OUT.setdefault("scale", self.scale)
        return self.fc(x) * self.scale


def test_parameters_that_a_table_hands_out_by_name_are_refused_with_what_to_write() -> None:
    HANDED_OUT.clear()
    wrapped: Any = vote.Wrapper(VOTERS)(FromTable()).eval()
    with pytest.raises(RuntimeError, match=r"A table outside the model .*: let each have its own, pyro\.settings"):
        wrapped(torch.randn(6, 5))


# ---- weights that hooks compute --------------------------------------------------------------------------------------


def with_spectral_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, but models made with it live on
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 2))


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


@pytest.mark.parametrize("wrapper", [vote.Wrapper(VOTERS), sculpt.Wrapper(), vote.Wrapper(VOTERS, prior=1.0)], ids=repr)
@pytest.mark.parametrize("build", [with_spectral_norm, pruned])
def test_wrapping_draws_nothing_into_weights_of_the_given_model(build: Any, wrapper: Any) -> None:
    model = build()
    before, weight = copy.deepcopy(model.state_dict()), model[0].weight.detach().clone()
    wrapper(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight, weight)


# ---- recomputed activations ------------------------------------------------------------------------------------------


class Recomputes(Kept):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda z: torch.tanh(self.a(z)), x, use_reentrant=True))


def test_reentrant_checkpointing_under_noise_is_refused_with_what_to_do() -> None:
    wrapped: Any = sample.Wrapper(2)(Recomputes()).train()
    with pytest.raises(RuntimeError, match='where="weights"'):
        wrapped(torch.randn(6, 5, requires_grad=True))


# ---- a density alone -------------------------------------------------------------------------------------------------


def test_neo_alone_answers_with_risk_as_in_evaluation_mode() -> None:
    x = torch.randn(9, 5)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    wrapped: Any = neo.Wrapper()(net).fit(x).train()
    before, evaluated = copy.deepcopy(wrapped[1].running_mean), copy.deepcopy(net).eval()(x)
    y, _ = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, evaluated)
    assert torch.equal(wrapped[1].running_mean, before)
    wrapped(x)  # this trains
    assert not torch.equal(wrapped[1].running_mean, before)
    both: Any = compose(vote.Wrapper(2), neo.Wrapper())(net).fit(x).train()
    both(x, return_risk=True)
    assert not torch.equal(both[1].running_mean, before)
