"""Models at and beyond the limits of what can be wrapped: they work, or are refused with a remedy (see docs/limitations.md)."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from helpers.models import mlp
from helpers.reference_from_copies import NOISE, VOTERS, WRAPPERS, Net, asked, close, expected, inputs, seeded
from torch import Tensor, nn

import workbench
from workbench import WorkbenchWarning, compose, neo, sample, sculpt, vote


def wrapped_as(kind: str, model: nn.Module) -> Any:
    with seeded(1):
        return WRAPPERS[kind]("auto", 0.0)(model).eval()


# ---- functions that do more than a forward pass --------------------------------------------------------------------


def test_a_function_that_was_called_before_is_wrapped_all_the_same() -> None:
    model = mlp()

    def my_func(x: Tensor) -> Tensor:
        return 2 * model(x)

    x = inputs()
    before = my_func(x)
    wrapped: Any = vote.Wrapper(VOTERS)(my_func)
    y, risk = wrapped.eval()(x, return_risk=True)
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))
    assert torch.equal(my_func(x), before)


@pytest.mark.parametrize("build", [vote.Wrapper, sample.Wrapper, sculpt.Wrapper, neo.Wrapper])
def test_a_function_that_computes_a_backward_pass_is_refused(build: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def training_step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match=r"training_step .*wrap only the forward"):
        build()(training_step)(inputs(), torch.zeros(5, 1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_only_the_forward_pass_is_wrapped_and_trains() -> None:
    model = mlp()

    @vote.Wrapper(2)
    def my_forward_func(x: Tensor) -> Tensor:
        return model(x)

    wrapped: Any = my_forward_func
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(wrapped(inputs()), torch.ones(5, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


# ---- models that change their structure ----------------------------------------------------------------------------


class MakesLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.late: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.late is None:
            self.late = nn.Linear(3, 3)
        return self.late(self.a(x))


class GrowsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, torch.zeros(1)])
        return self.a(x) * len(self.seen)


ONE_LAYER = [kind for kind in WRAPPERS if kind != "sample_activations"]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_layer_made_in_forward_must_be_made_before_wrapping(kind: str) -> None:
    wrapped = wrapped_as(kind, MakesLayer())
    with pytest.raises((RuntimeError, ValueError), match=r"late.*before wrapping"):
        asked(wrapped, (inputs(),))


@pytest.mark.parametrize("kind", ONE_LAYER)
def test_a_layer_made_before_wrapping_is_right(kind: str) -> None:
    plain = MakesLayer()
    plain(inputs())
    wrapped = wrapped_as(kind, copy.deepcopy(plain))
    close(asked(wrapped, (inputs(),)), expected(kind, plain, wrapped, (inputs(),)))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_buffer_that_grows_is_refused(kind: str) -> None:
    wrapped = wrapped_as(kind, GrowsBuffer())
    with pytest.raises(
        RuntimeError, match=r"'seen.*changed its shape .*register it with its final shape before wrapping"
    ):
        asked(wrapped, (inputs(),))


class CachesBuffer(nn.Module):
    """Computes a table of positions for as many rows as the input has, in a buffer that no file holds."""

    def __init__(self, start: Tensor | None) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.scales: Tensor | None
        self.register_buffer("scales", start, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None or len(self.scales) != len(x):
            self.register_buffer("scales", torch.linspace(1, 2, len(x))[:, None], persistent=False)
        return self.a(x) * self.scales


@pytest.mark.parametrize("start", [torch.zeros(1, 1), None], ids=["zeros", "none"])
@pytest.mark.parametrize("kind", ONE_LAYER)
def test_a_cached_buffer_may_change_its_shape(kind: str, start: Tensor | None) -> None:
    plain = CachesBuffer(start).eval()
    wrapped = wrapped_as(kind, copy.deepcopy(plain))
    for rows in (5, 4, 2, 5):
        x = inputs()[:rows]
        for _ in range(3):
            with torch.no_grad():
                close(asked(wrapped, (x,)), expected(kind, plain, wrapped, (x,)))
            assert start is None or wrapped.scales.shape == (rows, 1)
    copied = copy.deepcopy(wrapped)
    close(asked(copied, (inputs()[:3],)), expected(kind, plain, wrapped, (inputs()[:3],)))


class HiddenStateInBuffer(nn.Module):
    """Goes on from what the last call has left in a buffer, as membranes of spiking neurons do."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.register_buffer("hidden", torch.zeros(5, 3), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = 0.5 * self.hidden + self.a(x)
        return self.hidden


def test_a_hidden_state_in_a_buffer_that_branches_share_is_told_and_the_remedy_works() -> None:
    with pytest.warns(
        WorkbenchWarning, match=r"buffer 'hidden', .* each branch goes on from the mean: .* persistent=True"
    ):
        vote.Wrapper(VOTERS)(HiddenStateInBuffer(persistent=False)).eval()(inputs())
    wrapped: Any = vote.Wrapper(VOTERS)(HiddenStateInBuffer(persistent=True)).eval()
    voters = wrapped.voters()
    for seed in (1, 2, 3):
        with torch.no_grad():
            y, risk = wrapped(inputs(seed), return_risk=True)
            answers = torch.stack([voter(inputs(seed)) for voter in voters])
        torch.testing.assert_close(y, answers.mean(0))
        torch.testing.assert_close(risk, answers.std(0, correction=0))


@pytest.mark.parametrize("start", [torch.zeros(1, 1), None], ids=["zeros", "none"])
def test_voters_with_a_cached_buffer_train_on_batches_of_several_sizes(start: Tensor | None) -> None:
    wrapped: Any = vote.Wrapper(VOTERS)(CachesBuffer(start))
    voters = wrapped.voters()
    x, y = torch.cat([inputs(), inputs(2)]), torch.ones(2 * len(inputs()), 3)
    fits = [(wrapped, wrapped.loss), *((voter, lambda f, x, y, voter=voter: f(voter(x), y)) for voter in voters)]
    losses: list[list[float]] = []
    for model, loss_of in fits:
        optimizer, history = torch.optim.SGD(model.parameters(), lr=0.1 * (VOTERS if model is wrapped else 1)), []
        for rows in [5, 5, 5, 5, 2] * 4:
            optimizer.zero_grad()
            loss = loss_of(nn.functional.mse_loss, x[:rows], y[:rows])
            loss.backward()
            optimizer.step()
            history.append(float(loss))
        losses.append(history)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1:]).mean(0))
    workbench.fit(wrapped, (x, y), batch_size=5, epochs=8, validation=0, progress=False)
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(x), torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))


def test_gradient_hooks_of_parameters_that_voters_replace_are_told() -> None:
    seen: list[Tensor] = []
    model: Any = mlp()
    model[0].weight.register_hook(lambda grad: seen.append(grad))
    with pytest.warns(workbench.WorkbenchWarning, match=r"0\.weight.*hook"):
        vote.Wrapper()(model)
    wrapped: Any = sculpt.Wrapper(n_layers=1)(model)  # shares the parameter, and its hook
    wrapped(inputs()).sum().backward()
    assert len(seen) == 1


def test_pruned_models_work_and_wrapped_ones_are_not_pruned() -> None:
    from torch.nn.utils import prune

    plain: Any = Net().eval()
    prune.l1_unstructured(plain.b, "weight", 0.5)
    for kind in ONE_LAYER:
        wrapped = wrapped_as(kind, plain)
        _, risks = asked(wrapped, (inputs(),))
        assert all(bool((risk > 0).any()) for risk in risks.values()) or kind == "sample_weights"
        for voter in wrapped.voters():
            assert torch.equal(voter.b.weight == 0, plain.b.weight_mask == 0)
    wrapped = wrapped_as("sculpt", Net())
    prune.l1_unstructured(wrapped.b, "weight", 0.5)
    with pytest.raises(RuntimeError, match=r"replaced after wrapping|not registered .* any more: .*wrap it again"):
        asked(wrapped, (inputs(),))


# ---- graphs, scripts and exports -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:torch.jit.TracerWarning")
def test_scripts_are_refused_both_ways_and_traces_of_wrapped_models_work() -> None:
    scripts: list[Any] = [torch.jit.script(mlp()), torch.jit.trace(mlp(), inputs())]
    for scripted in scripts:
        with pytest.raises(TypeError, match=r"scripted .*wrap the model"):
            vote.Wrapper()(scripted)
    wrapped: Any = compose(vote.Wrapper(VOTERS), sculpt.Wrapper())(mlp()).eval()
    with pytest.raises(TypeError, match=r"torch\.export\.export"):
        torch.jit.script(wrapped)
    traced = torch.jit.trace(wrapped, inputs(1), check_trace=False)
    torch.testing.assert_close(traced(inputs(2)), wrapped(inputs(2)))


class WithRisk(nn.Module):
    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Any:
        y, risk = self.wrapped(x, return_risk=True)
        return y, risk if isinstance(risk, Tensor) else risk.total


@pytest.mark.parametrize("rows", ["fixed", "dynamic"])
@pytest.mark.parametrize("kind", ["vote", "vote_share1", "sculpt", "vote_sculpt"])
def test_wrapped_models_can_be_exported(kind: str, rows: str) -> None:
    wrapped = wrapped_as(kind, Net())
    shapes = None if rows == "fixed" else ({0: torch.export.Dim("rows")},)
    x = inputs(2) if rows == "fixed" else torch.randn(9, 3)
    for model in (wrapped, WithRisk(wrapped)):
        exported = torch.export.export(model, (inputs(1),), dynamic_shapes=shapes).module()
        torch.testing.assert_close(exported(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_exported_models_are_wrapped_where_their_layers_can_be_seen() -> None:
    program = torch.export.export(Net().eval(), (inputs(),))
    with pytest.raises(TypeError, match=r"wrap the nn.Module that it was exported from, or its program.module\(\)"):
        vote.Wrapper(2)(cast(Any, program))
    exported: Any = program.module()
    for kind in ("vote", "sculpt", "sample_weights", "sample_activations"):
        with seeded(1):
            wrapped: Any = WRAPPERS[kind]("auto", 0.3)(exported)
        _, risks = asked(wrapped, (inputs(),))
        assert all(bool((risk > 0).all()) for risk in risks.values())


@pytest.mark.parametrize("kind", WRAPPERS)
def test_graph_modules_are_wrapped_and_wrapped_models_are_not_traced(kind: str) -> None:
    plain = torch.fx.symbolic_trace(Net()).eval()
    wrapped = wrapped_as(kind, copy.deepcopy(plain))
    close(asked(wrapped, (inputs(),)), expected(kind, plain, wrapped, (inputs(),)))
    with pytest.raises(TypeError, match="trace the plain model and wrap the GraphModule"):
        torch.fx.symbolic_trace(wrapped_as(kind, Net()))


class FuncJacrev(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacrev(self.h))(x)


class FuncHessian(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.hessian(lambda t: self.h(t).sum()))(x)


@pytest.mark.parametrize("strategy", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("cls", [FuncJacrev, FuncHessian])
def test_models_that_transform_functions_themselves(cls: type[nn.Module], kind: str, strategy: str) -> None:
    plain = cls().eval()
    noise = 0.0 if strategy == "vmap" and kind == "sample_weights" else NOISE  # there vmap draws other numbers
    wrapped: Any = WRAPPERS[kind](strategy, noise)(copy.deepcopy(plain))
    if kind == "sample_activations":  # their own vmap does not allow what is drawn inside it
        with pytest.raises(RuntimeError, match='where="weights"'):
            asked(wrapped, (inputs(),))
    else:
        close(asked(wrapped, (inputs(),)), expected(kind, plain, wrapped, (inputs(),), noise))


# ---- other kinds of parameters -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_quantized_layers_have_no_parameters_that_could_differ() -> None:
    from torch.ao.quantization import quantize_dynamic

    if torch.backends.quantized.engine == "none":
        torch.backends.quantized.engine = torch.backends.quantized.supported_engines[0]
    with pytest.raises(ValueError, match="no floating-point parameters"):
        vote.Wrapper()(quantize_dynamic(mlp(), {nn.Linear}))
    partly = nn.Sequential(
        nn.Conv1d(1, 4, 2), nn.Flatten(), quantize_dynamic(nn.Sequential(nn.Linear(8, 1)), {nn.Linear})
    )
    wrapped: Any = vote.Wrapper(VOTERS)(partly).eval()
    x = torch.randn(5, 1, 3)
    y, risk = wrapped(x, return_risk=True)
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    torch.testing.assert_close(y, answers.mean(0))
    assert bool((risk > 0).any())
    assert [name for name, _ in wrapped.named_risk_parameters() if not name.startswith("0.")] == []


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids))


SPARSE = {
    "vote": lambda: vote.Wrapper(VOTERS, independent=False),
    "share": lambda: vote.Wrapper(VOTERS, share=1, independent=False),
    "sample": lambda: sample.Wrapper(),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_stay_sparse(name: str) -> None:
    wrapped: Any = SPARSE[name]()(Embeds())
    wrapped(torch.tensor([1, 1, 3, 4])).sum().backward()
    (grad,) = [p.grad for n, p in wrapped.named_parameters() if n.startswith("embed") and "sculpt" not in n]
    assert grad.is_sparse
    if name == "vote":
        each = wrapped.voters()
        for voter in each:
            (voter(torch.tensor([1, 1, 3, 4])).sum() / VOTERS).backward()
        torch.testing.assert_close(grad.to_dense(), torch.stack([voter.embed.weight.grad.to_dense() for voter in each]))


def test_sparse_gradients_and_rank_one_factors_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"embed.*sparse"):
        vote.Wrapper(share="rank1")(Embeds())


def test_models_on_the_meta_device_are_wrapped_and_filled_later() -> None:
    real: Any = vote.Wrapper(VOTERS)(mlp()).eval()
    with torch.device("meta"):
        empty = mlp()
    wrapped: Any = vote.Wrapper(VOTERS)(empty).eval()
    assert {p.device.type for p in wrapped.parameters()} == {"meta"}
    wrapped.to_empty(device="cpu").load_state_dict(real.state_dict())
    assert torch.equal(wrapped(inputs()), real(inputs()))


@pytest.mark.parametrize("start", [torch.zeros(1, 1), None], ids=["zeros", "none"])
def test_a_cached_buffer_is_no_impurity(start: Tensor | None) -> None:
    """As other buffers that forward changes."""
    wrapped = vote.Wrapper(VOTERS, purity="raise")(CachesBuffer(start)).eval()
    for rows in (5, 3):
        wrapped(inputs()[:rows])
