"""The wrapped object is an object of the user's class in every respect, and a plain model again when asked."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import WorkbenchWarning, Wrapped, compose, is_wrapped, neo, sample, sculpt, unwrap, vote

MAKERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "last": lambda: vote.Wrapper(3, share=1),
    "sample": lambda: sample.Wrapper(3),
    "learned": lambda: sample.Wrapper(3, trainable=True),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "neo": lambda: neo.Wrapper(),
    "composed": lambda: compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)),
}
every_wrapper = pytest.mark.parametrize("name", MAKERS)


pytestmark = pytest.mark.usefixtures("seeded")


class Net(nn.Module):
    """A small network with attributes, a norm, a method and a tied weight."""

    kind = "small"

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.fc1 = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.fc2 = nn.Linear(width, 1)
        self.layers = [self.fc1, self.fc2]
        self.tags = {"a": 1}

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """Predict from x."""
        return self.fc2(torch.tanh(self.norm(self.fc1(x)))) * gain

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self(x)

    @property
    def size(self) -> int:
        return self.width


def wrap(name: str, model: nn.Module) -> Any:
    wrapped: Any = MAKERS[name]()(model).eval()
    if name == "neo":
        wrapped.fit(torch.randn(60, 3))
    return wrapped


def answer(wrapped: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The prediction and every risk, from one and the same noise."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        y, risk = wrapped(x, return_risk=True)
    return (y, risk) if isinstance(risk, Tensor) else (y, *(risk[part] for part in risk))


def equal(a: Any, b: Any, x: Tensor) -> bool:
    return all(torch.equal(p, q) for p, q in zip(answer(a, x), answer(b, x), strict=True))


# ---- class, attributes, modules --------------------------------------------------------------------------------------


@every_wrapper
def test_it_is_an_instance_of_the_users_class(name: str) -> None:
    model = Net()
    wrapped = wrap(name, model)
    assert isinstance(wrapped, Net)
    assert isinstance(wrapped, Wrapped)
    assert is_wrapped(wrapped)
    assert not is_wrapped(model)
    assert type(wrapped).__name__ == "Net"
    assert (wrapped.kind, wrapped.width, wrapped.size, wrapped.tags) == ("small", 8, 8, {"a": 1})
    assert inspect.getdoc(type(wrapped)) == inspect.getdoc(Net)


@every_wrapper
def test_methods_that_call_the_object_get_the_wrapped_prediction(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(4, 3)
    torch.manual_seed(7)
    y = wrapped(x)
    torch.manual_seed(7)
    assert torch.equal(wrapped.doubled(x), 2 * y)


@every_wrapper
def test_it_has_the_modules_of_the_model_under_their_names(name: str) -> None:
    model = Net()
    wrapped = wrap(name, model)
    own = {path: type(module) for path, module in wrapped.named_modules() if path and "@" not in path}
    assert own == {path: type(module) for path, module in model.named_modules() if path}
    assert wrapped.layers[0] is wrapped.fc1
    assert wrapped.layers[0] is not model.fc1


@every_wrapper
def test_the_given_model_stays_as_it_was_and_shares_what_no_method_took(name: str) -> None:
    model = Net().eval()
    x = torch.randn(5, 3)
    before, state = model(x), copy.deepcopy(model.state_dict())
    keys = list(model.__dict__)
    wrapped: Any = MAKERS[name]()(model)
    wrapped.train()
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped(torch.randn(12, 3))
    assert list(model.__dict__) == keys
    assert type(model) is Net
    assert not model.training
    shared = wrapped.base_parameters()
    for key, parameter in model.named_parameters():
        assert (key in shared) == (key in wrapped.state_dict())
        if key in shared:
            assert shared[key] is parameter
    if name in ("vote", "composed"):
        assert torch.equal(model(x), before)
    assert model.state_dict().keys() == state.keys()


@every_wrapper
def test_repr_names_the_methods_and_hides_what_they_added(name: str) -> None:
    wrapped = wrap(name, Net())
    text = repr(wrapped)
    assert text.startswith("Net[")
    assert "(fc1): Linear(in_features=3, out_features=8, bias=True)" in text
    assert all(method in text.splitlines()[0] for method in wrapped.methods)


def told_about_layers(name: str) -> Any:
    """Layers that voters took over answer as the first voter when they are called by themselves, and say so once."""
    return (
        pytest.warns(WorkbenchWarning, match="first voter only")
        if name in ("vote", "rank1", "composed")
        else contextlib.nullcontext()
    )


def test_sequential_models_index_count_and_iterate_over_their_own_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for name in MAKERS:
        wrapped = wrap(name, model)
        assert len(wrapped) == 3
        assert [type(layer) for layer in wrapped] == [nn.Linear, nn.Tanh, nn.Linear]
        assert wrapped[-1] is wrapped._modules["2"]
        assert len(wrapped[:2]) == 2
        with told_about_layers(name):
            assert wrapped[:2](torch.randn(4, 3)).shape == (4, 4)


@every_wrapper
def test_the_signature_of_forward_shows_the_models_arguments(name: str) -> None:
    wrapped = wrap(name, Net())
    parameters = inspect.signature(wrapped.forward).parameters
    assert list(parameters)[:2] == ["x", "gain"]
    assert parameters["gain"].default == 1.0
    x = torch.randn(4, 3)
    torch.manual_seed(7)
    y = wrapped(x)
    torch.manual_seed(7)
    assert torch.allclose(wrapped(x, gain=2.0), 2 * y)
    torch.manual_seed(7)
    assert torch.allclose(wrapped(x=x), y)


def test_the_models_own_names_win() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)
            self.scaling = 0.5
            self.methods = nn.Linear(1, 1)
            self.register_buffer("needs_fit", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.scaling * self.methods(self.fc(x)) * self.needs_fit

        def loss(self, x: Tensor) -> str:
            return "my loss"

        def voters(self) -> str:
            return "my voters"

        def fit(self, x: Tensor, y: Tensor) -> str:
            return "my fit"

        def scale(self) -> str:
            return "my scale"

    x = torch.randn(6, 3)
    for name in ("vote", "sample", "sculpt", "composed"):
        wrapped: Any = MAKERS[name]()(Named()).eval()
        assert wrapped.loss(x) == "my loss"
        assert wrapped.voters() == "my voters"
        assert wrapped.fit(x, x) == "my fit"
        assert wrapped.scale() == "my scale"
        assert wrapped.scaling == 0.5
        assert isinstance(wrapped.methods, nn.Linear)
        assert isinstance(wrapped.needs_fit, Tensor)
        assert answer(wrapped, x)[0].shape == (6, 1)
        assert torch.isfinite(Wrapped.loss(wrapped, nn.MSELoss(), x, torch.zeros(6, 1)))
        plain = wrapped.unwrap()
        assert plain(x).shape == (6, 1)
        assert len(Wrapped.voters(wrapped)) == (3 if "vote" in repr(wrapped) else 1)


def test_a_decorated_class_may_set_names_of_ours() -> None:
    @vote.Wrapper()
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)
            self.scaling = 0.5
            self.methods = ["a"]

        def forward(self, x: Tensor) -> Tensor:
            return self.scaling * self.fc(x)

    net: Any = Named()
    _, risk = net.eval()(torch.randn(4, 3), return_risk=True)
    assert bool((risk > 0).all())
    assert (net.scaling, net.methods) == (0.5, ["a"])


# ---- moving and copying ----------------------------------------------------------------------------------------------


@every_wrapper
def test_double_changes_every_tensor_and_the_numbers_stay(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    before = answer(wrapped, x) if name not in ("sample", "learned") else None
    assert wrapped.double() is wrapped
    after = answer(wrapped, x.double())
    assert all(value.dtype == torch.float64 for value in after[:1])
    if before is not None:
        assert all(torch.allclose(a.float(), b, atol=1e-4) for a, b in zip(after, before, strict=True))
    wrapped.to(torch.float32)
    assert answer(wrapped, x)[0].dtype == torch.float32


@every_wrapper
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_are_equal_and_independent(name: str, how: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    answer(wrapped, x)
    if how == "deepcopy":
        other = copy.deepcopy(wrapped)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(wrapped))
    else:
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert isinstance(other, Net)
    assert is_wrapped(other)
    assert other.methods == wrapped.methods
    assert other.layers[0] is other.fc1
    assert equal(wrapped, other, x)
    expected = answer(wrapped, x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    assert not equal(wrapped, other, x)
    assert all(torch.equal(a, b) for a, b in zip(answer(wrapped, x), expected, strict=True))


@every_wrapper
def test_a_shallow_copy_shares_its_tensors(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    other = copy.copy(wrapped)
    assert equal(wrapped, other, x)
    assert {id(p) for p in other.parameters()} == {id(p) for p in wrapped.parameters()}
    other.note = "mine"
    assert not hasattr(wrapped, "note")


@every_wrapper
def test_copies_train(name: str) -> None:
    other = copy.deepcopy(wrap(name, Net())).train()
    x = torch.randn(12, 3)
    y, risk = other(x, return_risk=True)
    (y.square().mean() + (risk if isinstance(risk, Tensor) else risk.total).sum()).backward()
    reached = [key for key, p in other.named_parameters() if p.grad is not None]
    assert reached
    other.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in other.parameters())


def test_derivatives_by_the_input_are_those_of_the_mean_voter() -> None:
    wrapped: Any = vote.Wrapper(3)(Net()).eval()
    x = torch.randn(5, 3, requires_grad=True)
    expected = torch.stack([torch.autograd.grad(v(x).sum(), x)[0] for v in wrapped.voters()]).mean(0)
    jacobian = torch.func.jacrev(lambda rows: wrapped(rows).sum())(x.detach())
    assert torch.allclose(jacobian, expected, atol=1e-6)
    assert torch.allclose(torch.autograd.grad(wrapped(x).sum(), x)[0], expected, atol=1e-6)
    per_row = torch.vmap(lambda row: wrapped(row[None])[0])(x.detach())
    assert torch.allclose(per_row, wrapped(x), atol=1e-6)


@every_wrapper
def test_other_parameters_can_be_called_functionally(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(4, 3)
    before = answer(wrapped, x)
    if name in ("vote", "sculpt"):
        zeros = {key: torch.zeros_like(p) for key, p in wrapped.named_parameters()}
        assert torch.equal(torch.func.functional_call(wrapped, zeros, (x,)), torch.zeros(4, 1))
    same = dict(wrapped.named_parameters())
    with torch.random.fork_rng():
        torch.manual_seed(7)
        y = torch.func.functional_call(wrapped, same, (x,), {"return_risk": True})[0]
    assert torch.equal(y, before[0])
    assert all(torch.equal(a, b) for a, b in zip(answer(wrapped, x), before, strict=True))


def test_an_average_of_weights_follows_the_training() -> None:
    wrapped: Any = vote.Wrapper(3)(Net()).train()
    average: Any = torch.optim.swa_utils.AveragedModel(wrapped)
    opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    sums = [torch.zeros_like(p) for p in wrapped.parameters()]
    for _ in range(3):
        opt.zero_grad()
        wrapped(torch.randn(9, 3)).square().mean().backward()
        opt.step()
        average.update_parameters(wrapped)
        sums = [total + p.detach() for total, p in zip(sums, wrapped.parameters(), strict=True)]
    for mean, total in zip(average.module.parameters(), sums, strict=True):
        assert torch.allclose(mean, total / 3, atol=1e-6)
    x = torch.randn(5, 3)
    answers = torch.stack([voter(x) for voter in average.module.eval().voters()])
    assert torch.allclose(average.eval()(x), answers.mean(0), atol=1e-6)


# ---- parts -----------------------------------------------------------------------------------------------------------


@every_wrapper
def test_unwrap_gives_a_plain_model_of_the_class(name: str) -> None:
    model = Net().eval()
    wrapped = wrap(name, model)
    plain = wrapped.unwrap()
    x = torch.randn(5, 3)
    assert type(plain) is Net
    assert not is_wrapped(plain)
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert list(dict(plain.named_parameters())) == list(dict(model.named_parameters()))
    assert not [key for key in plain.__dict__ if "workbench" in key or "@" in key]
    expected = wrapped.voters()[0] if "vote" in wrapped.methods else model
    assert torch.allclose(plain(x), expected(x), atol=1e-6)
    assert torch.equal(unwrap(wrapped)(x), plain(x))
    if name != "rank1":  # there every tensor of a voter is a product
        shared = wrapped.base_parameters()
        assert all(p is shared[key] for key, p in plain.named_parameters() if key in shared)


@every_wrapper
def test_voters_are_plain_models_with_tensors_of_their_own(name: str) -> None:
    wrapped = wrap(name, Net())
    voters = wrapped.voters()
    x = torch.randn(5, 3)
    assert len(voters) == (3 if "vote" in wrapped.methods else 1)
    held = {id(p) for p in wrapped.parameters()}
    for voter in voters:
        assert type(voter) is Net
        assert not is_wrapped(voter)
        assert not held & {id(p) for p in voter.parameters()}
        assert all(p.requires_grad for p in voter.parameters())
    if "vote" in wrapped.methods:
        answers = torch.stack([voter(x) for voter in voters])
        assert torch.allclose(wrapped(x), answers.mean(0), atol=1e-6)
        assert float((answers[0] - answers[1]).detach().abs().max()) > 1e-4


def test_every_parameter_of_every_voter_differs_after_wrapping() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.scale_ = nn.Parameter(torch.ones(4))
            self.shift = nn.Parameter(torch.zeros(4))
            self.norm = nn.LayerNorm(4)
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x, x, x)[0] * self.scale_ + self.shift
            return self.lstm(self.norm(x))[0]

    wrapped: Any = vote.Wrapper(3)(Mixed()).eval()
    for key, *values in zip(
        dict(wrapped.voters()[0].named_parameters()), *(voter.parameters() for voter in wrapped.voters()), strict=True
    ):
        for i, j in ((0, 1), (0, 2), (1, 2)):
            assert not torch.equal(values[i], values[j]), key
    x = torch.randn(2, 5, 4)
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    assert torch.allclose(wrapped(x), answers.mean(0), atol=1e-5)


@every_wrapper
def test_risk_and_base_parameters_part_all_parameters(name: str) -> None:
    model = Net()
    wrapped = wrap(name, model)
    risk, base = wrapped.risk_parameters(), wrapped.base_parameters()
    everything = dict(wrapped.named_parameters())
    assert risk.keys() | base.keys() == everything.keys()
    assert not risk.keys() & base.keys()
    assert bool(base) == (name not in ("vote", "composed"))
    with torch.random.fork_rng():
        torch.manual_seed(99)
        other = wrap(name, model)
    other.set_risk_parameters(risk)
    assert all(torch.equal(p, risk[key]) for key, p in other.risk_parameters().items())


# ---- hooks, threads, modes -------------------------------------------------------------------------------------------


@every_wrapper
def test_hooks_on_the_wrapped_object_fire_once_a_call(name: str) -> None:
    wrapped = wrap(name, Net())
    fired: list[str] = []
    wrapped.register_forward_pre_hook(lambda module, args: fired.append("before"))
    wrapped.register_forward_hook(lambda module, args, output: fired.append("after"))
    wrapped(torch.randn(4, 3))
    wrapped(torch.randn(4, 3), return_risk=True)
    assert fired == ["before", "after"] * 2


def test_hooks_on_the_given_model_go_along_and_may_change_its_output() -> None:
    model = Net().eval()
    model.register_forward_hook(lambda module, args, output: output + 10)
    model.fc1.register_forward_hook(lambda module, args, output: output * 0)
    x = torch.randn(4, 3)
    plain = model(x)
    wrapped: Any = sculpt.Wrapper(n_layers=1)(model).eval()
    assert torch.allclose(wrapped(x), plain)
    assert torch.allclose(vote.Wrapper(3, finetune=True)(model).eval()(x), plain, atol=1e-6)


def test_hooks_added_to_a_layer_after_wrapping_are_used() -> None:
    wrapped: Any = vote.Wrapper(3)(Net()).eval()
    x = torch.randn(4, 3)
    wrapped(x)
    seen: list[torch.Size] = []
    handle = wrapped.fc2.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    wrapped(x)
    assert len(seen) in (1, 3)
    handle.remove()
    wrapped(x)
    assert len(seen) in (1, 3)


@pytest.mark.parametrize("strategy", ["loop", "vmap"])
def test_threads_that_share_an_object_get_right_numbers(strategy: str) -> None:
    wrapper = compose(vote.Wrapper(3, strategy=strategy), sculpt.Wrapper(n_layers=1))
    wrapped: Any = wrapper(Net()).eval()
    inputs = [torch.randn(8, 3) for _ in range(4)]
    expected = [answer(wrapped, x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(8):
            y, risk = wrapped(inputs[i], return_risk=True)
            got = (y, *(risk[part] for part in risk))
            if not all(torch.equal(a, b) for a, b in zip(got, expected[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@every_wrapper
def test_train_and_eval_switch_every_branch(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(12, 3)
    before = answer(wrapped, x)[0]
    buffers = {key: value.clone() for key, value in wrapped.state_dict().items() if "num_batches_tracked" in key}
    assert buffers
    wrapped(x, return_risk=True)
    assert all(torch.equal(wrapped.state_dict()[key], value) for key, value in buffers.items())
    wrapped.train()
    assert wrapped.fc1.training
    wrapped(x)
    moved = wrapped.state_dict()
    for key, value in buffers.items():
        if "sculpt" not in key:  # the risk head runs only when risk is asked for
            assert torch.equal(moved[key], value + 1), key
    wrapped.eval()
    assert not torch.equal(answer(wrapped, x)[0], before)


@every_wrapper
def test_inference_mode_and_no_grad_give_the_same_numbers(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    with torch.inference_mode():
        inside = answer(wrapped, x)
    with torch.no_grad():
        without = answer(wrapped, x)
    assert not inside[0].requires_grad
    after = answer(wrapped, x)
    assert after[0].requires_grad
    for first, second, third in zip(inside, without, after, strict=True):
        assert torch.allclose(first, second, atol=1e-6)
        assert torch.allclose(second, third, atol=1e-6)


@every_wrapper
def test_autocast_computes_in_half_precision(name: str) -> None:
    wrapped = wrap(name, Net())
    x = torch.randn(5, 3)
    full = answer(wrapped, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = answer(wrapped, x)
    assert half[0].dtype == torch.bfloat16
    if name not in ("sample", "learned"):
        assert torch.allclose(half[0].float(), full[0], atol=0.05)
        assert all(torch.allclose(h.float(), f, atol=0.1) for h, f in zip(half[1:2], full[1:2], strict=True))


@every_wrapper
def test_a_layer_replaced_after_wrapping_is_used(name: str) -> None:
    wrapped = wrap(name, nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    x = torch.randn(4, 3)
    wrapped(x)
    wrapped[1] = nn.ReLU()
    torch.manual_seed(7)
    y = wrapped(x)
    if "vote" in wrapped.methods:
        expected = torch.stack([v[2](torch.relu(v[0](x))) for v in wrapped.voters()]).mean(0)
        assert torch.allclose(y, expected, atol=1e-6)
    elif name in ("sculpt", "neo"):
        assert torch.equal(y, wrapped[2](torch.relu(wrapped[0](x))))
    else:
        wrapped[1] = nn.Threshold(1e9, 0.0)
        assert torch.allclose(wrapped(x), wrapped[2].bias.expand(4, 1), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "learned"])
def test_a_layer_with_weights_replaced_after_wrapping_is_used_or_refused(name: str) -> None:
    def blank() -> nn.Linear:
        layer = nn.Linear(3, 8)
        nn.init.zeros_(layer.weight)
        return layer

    x = torch.randn(4, 3)
    wrapped = wrap(name, nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    wrapped(x)
    wrapped[0] = blank()
    if name in ("vote", "rank1", "composed"):  # the voters have weights of their own there
        with pytest.raises(RuntimeError, match=r"0\.(weight|bias) was replaced after wrapping.*wrap it again"):
            wrapped(x)
        return
    torch.manual_seed(7)
    y = wrapped(x)
    torch.manual_seed(7)
    assert torch.allclose(y, wrapped(torch.zeros(4, 3)), atol=1e-6)  # all rows are alike to weights of zero


def test_a_layer_with_a_learned_amount_of_noise_cannot_be_replaced_in_silence() -> None:
    wrapped = wrap("learned", nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    wrapped[2] = nn.Linear(8, 1)
    with pytest.raises((KeyError, RuntimeError), match=r"2\.weight.*replaced after wrapping"):
        wrapped(torch.randn(4, 3))


def test_assigned_state_shows_in_the_layers() -> None:
    first: Any = vote.Wrapper(3)(Net()).eval()
    second: Any = vote.Wrapper(3)(Net()).eval()
    x = torch.randn(4, 3)
    second(x)
    second.load_state_dict(first.state_dict(), assign=True)
    assert torch.equal(second(x), first(x))
    with pytest.warns(WorkbenchWarning, match="first voter only"):
        assert torch.equal(second.fc1(x), first.fc1(x))
    assert torch.equal(second.fc1(x), second.voters()[0].fc1(x))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@every_wrapper
def test_a_checkpoint_of_the_plain_model_loads(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        trained = Net().eval()
    wrapped = wrap(name, Net())
    wrapped.load_state_dict(trained.state_dict())
    x = torch.randn(4, 3)
    if name in ("sculpt", "neo"):
        assert torch.equal(wrapped(x), trained(x))
    elif name in ("vote", "composed", "last"):
        for voter in wrapped.voters():
            assert torch.equal(voter(x), trained(x))
    elif name == "rank1":
        assert torch.equal(wrapped.base_parameters()["fc1.weight"], trained.fc1.weight)
        assert all(torch.equal(voter.fc1.bias, trained.fc1.bias) for voter in wrapped.voters())
    else:
        assert torch.equal(wrapped.unwrap()(x), trained(x))


@every_wrapper
def test_keys_of_shared_parameters_are_the_models(name: str) -> None:
    model = Net()
    wrapped = wrap(name, model)
    state = wrapped.state_dict()
    shared = {key for key in state if "@" not in key}
    assert shared <= model.state_dict().keys()
    if name in ("sample", "sculpt", "neo"):
        assert shared == model.state_dict().keys()


@every_wrapper
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(name: str) -> None:
    def steps(wrapped: Any, opt: torch.optim.Optimizer, seeds: range) -> None:
        wrapped.train()
        for seed in seeds:
            torch.manual_seed(seed)
            x = torch.randn(12, 3)
            opt.zero_grad()
            wrapped.loss(nn.MSELoss(), x, x.sum(1, keepdim=True)).backward()
            opt.step()

    wrapped = wrap(name, Net())
    opt = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    steps(wrapped, opt, range(3))
    file = io.BytesIO()
    torch.save({"model": wrapped.state_dict(), "opt": opt.state_dict()}, file)
    steps(wrapped, opt, range(3, 6))
    file.seek(0)
    saved = torch.load(file)
    other = wrap(name, Net())
    other_opt = torch.optim.Adam(other.parameters(), lr=0.01)
    other.load_state_dict(saved["model"])
    other_opt.load_state_dict(saved["opt"])
    steps(other, other_opt, range(3, 6))
    for (key, p), (other_key, q) in zip(wrapped.named_parameters(), other.named_parameters(), strict=True):
        assert key == other_key
        assert torch.equal(p, q), key
    x = torch.randn(5, 3)
    assert equal(wrapped.eval(), other.eval(), x)


@every_wrapper
def test_a_wrapped_model_works_as_a_part_of_another(name: str) -> None:
    whole = nn.Sequential(nn.Linear(2, 3), wrap(name, Net())).eval()
    x = torch.randn(4, 2)
    torch.manual_seed(7)
    y = whole(x)
    twin = copy.deepcopy(whole)
    torch.manual_seed(7)
    assert torch.equal(twin(x), y)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1)
    twin.load_state_dict(whole.state_dict())
    torch.manual_seed(7)
    assert torch.equal(twin(x), y)
