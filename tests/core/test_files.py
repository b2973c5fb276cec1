"""A wrapped model is written completely or not at all, and is restored from the plain model and the file alone."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_files import contents, rewrite
from helpers.checkpoint_models import MAKERS, Net, X, assert_same, facts, net, wrapped_net
from helpers.full_disk import limited_files
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from workbench import compose, distributions, is_wrapped, neo, sample, sculpt, vote
from workbench.core.saving.files import load, save
from workbench.methods.densities import Gaussian
from workbench.methods.vote import Vote

# ---- files -----------------------------------------------------------------------------------------------------------

FULL: dict[str, Callable[[], Any]] = {
    **MAKERS,
    "vote_options": lambda: vote.Wrapper(
        2, alpha=0.3, use_bias=False, independent=False, finetune=True, share="rank1", strategy="loop"
    ),
    "sample_options": lambda: sample.Wrapper(2, sample.Normal(0.1 + 0.2), "weights", True, randomness="same"),
    "sample_inputs": lambda: sample.Wrapper(2, sample.Bernoulli(0.3), "inputs"),
    "sculpt_df": lambda: sculpt.Wrapper(distributions.StudentT(df=3.5), n_layers=2),
    "sculpt_beta": lambda: sculpt.Wrapper(distributions.Normal(beta=0.5)),
    "logits": lambda: compose(
        sculpt.Wrapper(distributions.LogitNormal(pairwise=True), output="logits"), vote.Wrapper(2)
    ),
    "neo_options": lambda: neo.Wrapper(layers=["first", "last"], density=Gaussian(n_components=2, shrinkage=0.2)),
}


def settings(wrapped: Any) -> list[Any]:
    """All that the methods know, but for what lies in tensors."""
    record = wrapped._workbench
    return [record.output, record.strategy, record.rows, *map(_options, record.methods)]


def _options(thing: Any) -> Any:
    return type(thing), {
        key: _options(value) if hasattr(value, "__dict__") else value
        for key, value in vars(thing).items()
        if key not in ("density", "_sites", "_met")
    }


@pytest.mark.parametrize("name", FULL)
def test_a_file_gives_the_wrapped_model_back_from_the_plain_one(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        wrapped: Any = FULL[name]()(net(1)).eval()
    wrapped.scale(x_mean=torch.ones(3), x_scale=torch.full((3,), 2.0), y_mean=torch.ones(1), y_scale=torch.ones(1) * 3)
    if "neo" in wrapped.methods:
        wrapped.fit(X)
    wrapped._workbench.rows = 60
    path = tmp_path / "new" / "model.safetensors"
    save(wrapped, path)
    state = torch.get_rng_state()
    other = load(path, net(3)).eval()
    assert torch.equal(torch.get_rng_state(), state)
    assert type(other) is type(wrapped)
    assert settings(other) == settings(wrapped)
    assert facts(other) == facts(wrapped)
    assert_same(other, wrapped)
    if "neo" in wrapped.methods:
        densities = [model.get_submodule("extras@workbench").density for model in (other, wrapped)]
        assert type(densities[0]) is type(densities[1])
        assert densities[0].n_components == densities[1].n_components
        assert densities[0].shrinkage == densities[1].shrinkage
    for mine, theirs in zip([*other.voters(), other.unwrap()], [*wrapped.voters(), wrapped.unwrap()], strict=True):
        assert torch.equal(mine(X), theirs(X))
    again = FULL[name]()(net(3)).eval()
    again.load_state_dict(load_file(path))  # the same file read by hand
    assert_same(again, wrapped)
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_loading_into_a_wrapped_model_is_in_place(tmp_path: Path) -> None:
    for name in MAKERS:
        wrapped, other = wrapped_net(name), wrapped_net(name, seed=3, fit=False)
        held = list(other.parameters())
        save(wrapped, tmp_path / "model")
        assert load(tmp_path / "model", other) is other
        assert_same(other, wrapped)
        if "neo" not in other.methods:
            assert all(p is q for p, q in zip(held, other.parameters(), strict=True))


def test_what_no_method_takes_over_is_shared_with_the_model_that_is_given(tmp_path: Path) -> None:
    save(wrapped_net("sculpt"), tmp_path / "model")
    model = net(3)
    wrapped = load(tmp_path / "model", model)
    assert all(p is dict(model.named_parameters())[key] for key, p in wrapped.named_base_parameters())
    assert torch.equal(model(X), net(1)(X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    wrapped = wrapped_net("all").to(dtype)
    wrapped.norm.float()  # a mixture
    save(wrapped, tmp_path / "model")
    for other in (load(tmp_path / "model", net(3)), load(tmp_path / "model", wrapped_net("all", seed=3, fit=False))):
        for (key, mine), theirs in zip(other.state_dict().items(), wrapped.state_dict().values(), strict=True):
            assert mine.dtype == theirs.dtype, key
            assert torch.equal(mine, theirs), key


def test_a_model_on_the_meta_device_takes_the_files_own_tensors(tmp_path: Path) -> None:
    for name in MAKERS:
        save(wrapped_net(name), tmp_path / "model")
        with torch.device("meta"):
            model = Net()
        other = load(tmp_path / "model", model).eval()
        assert_same(other, wrapped_net(name))
        assert not any(tensor.is_meta for tensor in other.state_dict().values())


@pytest.mark.parametrize("frozen_now", [(), ("first",), ("first", "middle", "norm", "last")])
def test_what_was_frozen_when_it_was_wrapped_need_not_be_frozen_again(
    frozen_now: tuple[str, ...], tmp_path: Path
) -> None:
    model = net(1)
    model.first.requires_grad_(False)
    wrapped: Any = vote.Wrapper(3)(model).eval()
    assert "first.weight" in dict(wrapped.named_base_parameters())
    save(wrapped, tmp_path / "model")
    fresh = net(3)
    for part in frozen_now:
        fresh.get_submodule(part).requires_grad_(False)
    flags = {key: p.requires_grad for key, p in fresh.named_parameters()}
    other = load(tmp_path / "model", fresh).eval()
    assert_same(other, wrapped)
    assert {key: p.requires_grad for key, p in fresh.named_parameters()} == flags
    assert {key.split("@")[0]: p.requires_grad for key, p in other.named_parameters()} == flags


def test_tied_and_overlapping_tensors_are_stored_once_or_apart(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows: Tensor
            self.more: Tensor
            self.phase: Tensor
            self.one = nn.Linear(3, 3)
            self.two = self.one  # a module with two names
            whole = torch.randn(4, 3)
            self.register_buffer("rows", whole[:2])
            self.register_buffer("more", whole[1:])
            self.register_buffer("turned", whole.T)
            self.three = nn.Linear(3, 3)
            self.three.weight = nn.Parameter(self.one.weight.data)  # another parameter over the same memory
            self.register_buffer("phase", torch.randn(3, dtype=torch.complex128))
            self.register_buffer("none", torch.empty(0))

        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.two(self.one(x))) + self.rows.sum() + self.more.sum() + self.phase.abs().sum()

    for make in (vote.Wrapper(2), vote.Wrapper(2, share=1), sculpt.Wrapper(), sample.Wrapper()):
        wrapped: Any = make(Shared()).eval()
        before = facts(wrapped)
        save(wrapped, tmp_path / "model")
        other = load(tmp_path / "model", Shared()).eval()
        assert facts(other) == facts(wrapped) == before
        assert_same(other, wrapped, X)
        assert other.one is other.two
        stored = [key.split("@")[0] for key in load_file(tmp_path / "model")]
        assert "one.bias" in stored
        assert "two.bias" not in stored


def test_functions_decorated_classes_and_compiled_models_have_files_too(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    wrapped: Any = vote.Wrapper(2)(lambda x: torch.tanh(first(x)))
    save(wrapped.eval(), tmp_path / "function")
    with pytest.raises(ValueError, match="second"):
        load(tmp_path / "function", lambda x: torch.tanh(second(x)))  # its module has another name
    first.reset_parameters()
    assert_same(load(tmp_path / "function", lambda x: torch.tanh(first(x))).eval(), wrapped)

    @vote.Wrapper(2)
    class Decorated(Net):
        pass

    one: Any = Decorated().eval()
    save(torch.compile(one), tmp_path / "class")
    assert_same(load(tmp_path / "class", Decorated()).eval(), one)
    assert_same(load(tmp_path / "class", torch.compile(net(3))).eval(), one)


def test_a_wrapped_part_and_another_method_are_found_again(tmp_path: Path) -> None:
    class Encoder(Net):
        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.first(x))

    def whole(seed: int) -> nn.Module:
        return nn.Sequential(net(seed), nn.Linear(2, 2))

    parts: Any = vote.Wrapper(3)(whole(1), at="0").eval()
    save(parts, tmp_path / "part")
    for model in (whole(3), vote.Wrapper(3)(whole(3), at="0")):
        other = load(tmp_path / "part", model).eval()
        assert facts(other) == facts(parts)
        assert torch.equal(other(X), parts(X))
        assert_same(other[0], parts[0])
    with pytest.raises(ValueError, match=r"0 of torch.*Sequential is wrapped, in this model the whole"):
        load(tmp_path / "part", vote.Wrapper(3)(whole(3)))
    with pytest.raises(ValueError, match="this Linear cannot be wrapped in the same way"):
        load(tmp_path / "part", nn.Linear(2, 2))
    encoder: Any = vote.Wrapper(3)(Encoder(), method="encode").eval()
    save(encoder, tmp_path / "method")
    other = load(tmp_path / "method", Encoder()).eval()
    for mine, theirs in zip(other.encode(X, return_risk=True), encoder.encode(X, return_risk=True), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="encode"):
        load(tmp_path / "method", net(3))


# ---- files that cannot be written or read ----------------------------------------------------------------------------


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    save(wrapped_net("vote"), path)
    before = path.read_bytes()

    def full(*args: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        save(wrapped_net("sculpt"), path)
    monkeypatch.undo()
    with limited_files(100), pytest.raises(OSError, match=f"^{path} can't be written: .*too large"):
        save(wrapped_net("sculpt"), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model"]


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    class WithMore(Net):
        def get_extra_state(self) -> Any:
            return {"a": [object()]}

        def set_extra_state(self, state: Any) -> None:
            assert "a" in state

    empty = vote.Wrapper(2)(nn.Linear(2, 1, device="meta"))
    for thing, error, says in [
        (net(1), TypeError, "a plain Net.*wrap it"),
        (vote.Wrapper(2)(WithMore()), TypeError, "_extra_state in the state_dict is or holds a object"),
        (empty, ValueError, "meta device"),
        (Net, TypeError, "the class Net"),
    ]:
        with pytest.raises(error, match=says):
            save(thing, tmp_path / "model")
    assert not os.listdir(tmp_path)


class Counts(Net):
    """Has a state that is no tensor: what it has seen, beside a function."""

    def __init__(self, function: Any = torch.tanh) -> None:
        super().__init__()
        self.seen: Any = {"rows": 0, "sizes": (), (1, 2): [None, 0.5, "a"], "function": function}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Described(Net):
    """Adds its settings to the state, and removes them before it loads one, as models of neuraloperator do."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.settings = {"width": width, "activation": nn.functional.gelu, "layer": nn.Linear, "modes": (3, 4)}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["_settings"] = self.settings
        return state

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        state = dict(state)
        if state.pop("_settings") != self.settings:
            raise ValueError("made with other settings")
        return super().load_state_dict(state, *args, **kwargs)


@pytest.mark.parametrize("name", ["vote", "sculpt", "vote_sculpt"])
def test_states_with_numbers_texts_and_functions(name: str, tmp_path: Path) -> None:
    counts = MAKERS[name]()(Counts()).eval()
    counts.seen |= {"rows": 7, "sizes": (3, 5)}
    described = MAKERS[name]()(Described()).eval()
    for wrapped, build in ((counts, Counts), (described, Described)):
        save(wrapped, tmp_path / "model")
        again = load(tmp_path / "model", build()).eval()
        assert torch.equal(again(X), wrapped(X))
        again = load(tmp_path / "model", MAKERS[name]()(build())).eval()
        assert torch.equal(again(X), wrapped(X))
        assert again.state_dict().keys() == wrapped.state_dict().keys()
        if build is Counts:
            assert again.seen == wrapped.seen
            assert again.seen["function"] is torch.tanh


def test_states_with_settings_of_other_models_change_nothing(tmp_path: Path) -> None:
    for model, other, says in [
        (Counts(), Counts(torch.relu), "was saved with .*tanh, which this model does not have"),
        (Described(), Described(5), "made with other settings"),
        (Counts(), Net(), "_extra_state only in the file"),
        (Net(), Counts(), "_extra_state only in the model"),
    ]:
        save(vote.Wrapper(2)(model), tmp_path / "model")
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=says):
            load(tmp_path / "model", other)
        assert all(equal_entries(value, before[name]) for name, value in other.state_dict().items())
    with pytest.raises(
        TypeError, match="_settings in the state_dict is no tensor, and Sequential has no load_state_dict"
    ):
        save(vote.Wrapper(2)(nn.Sequential(Described())), tmp_path / "model")
    with pytest.raises(TypeError, match="_extra_state in the state_dict is or holds a function"):
        save(vote.Wrapper(2)(Counts(lambda x: x)), tmp_path / "model")


def equal_entries(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


def test_files_that_are_not_ours_are_named(tmp_path: Path) -> None:
    torch.save(net(1).state_dict(), tmp_path / "state.pt")
    save_model(net(1), str(tmp_path / "plain"))
    (tmp_path / "empty").touch()
    save(wrapped_net("vote"), tmp_path / "ours")
    text = (tmp_path / "ours").read_bytes()
    (tmp_path / "newer").write_bytes(text.replace(rb"{\"version\": 2", rb"{\"version\": 9"))
    (tmp_path / "torn").write_bytes(text[: len(text) // 2])
    for name, error, says in [
        ("nothing", FileNotFoundError, "nothing does not exist"),
        (".", FileNotFoundError, "folder"),
        ("state.pt", ValueError, "torch.save.*torch.load"),
        ("empty", ValueError, "not a safetensors file"),
        ("torn", ValueError, "not a safetensors file"),
        ("plain", ValueError, "plain model.*load_state_dict"),
        ("newer", ValueError, "newer workbench.*format 9"),
    ]:
        with pytest.raises(error, match=says):
            load(tmp_path / name, net(3))


@pytest.mark.parametrize("name", ["vote", "rank1", "sculpt", "sample", "neo", "vote_sculpt"])
def test_a_model_that_does_not_fit_is_told_its_first_tensors_and_stays(name: str, tmp_path: Path) -> None:
    save(wrapped_net(name), tmp_path / "model")
    wide = net(3, 5)
    before = facts(wide)
    with pytest.raises(
        ValueError, match=r"Net and does not fit this Net: first\.weight \(4, 3\) in the file, \(5, 3\) in the model"
    ):
        load(tmp_path / "model", wide)
    other = nn.Sequential(nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"Net and does not fit this Sequential: 0\.weight only in the model; .*Build"):
        load(tmp_path / "model", other)
    assert facts(wide) == before
    assert not is_wrapped(wide)
    with pytest.raises(TypeError, match="not the class Net"):
        load(tmp_path / "model", Net)


def test_a_wrapped_model_of_other_settings_is_told_and_stays(tmp_path: Path) -> None:
    save(wrapped_net("vote"), tmp_path / "model")
    for make, says in [
        (lambda: vote.Wrapper(4), "n_voters=3.*n_voters=4"),
        (lambda: vote.Wrapper(3, output="probs"), "output='values'.*output='probs'"),
        (lambda: sculpt.Wrapper(), "no such method"),
    ]:
        other: Any = make()(net(3))
        before = facts(other)
        with pytest.raises(ValueError, match=says):
            load(tmp_path / "model", other)
        assert facts(other) == before
    with pytest.raises(ValueError, match="wrapped already"):
        load(tmp_path / "model", wrapped_net("vote"), wrapper=vote.Wrapper(3))
    small = nn.Linear(3, 1)
    save(vote.Wrapper(2, share=3)(net(1)), tmp_path / "last")
    with pytest.raises(
        ValueError, match=r"saved from .*Net, and this Linear cannot be wrapped in the same way: share=3"
    ):
        load(tmp_path / "last", small)


class OwnVote(Vote):
    """A method of the user's own."""


class OwnWrapper(vote.Wrapper):
    def make(self) -> list[Any]:
        return [OwnVote(self)]


class OwnNoise(sample.Normal):
    """Noise of the user's own."""


class OwnDistribution(distributions.Normal):
    """A distribution of the user's own."""


class OwnDensity(Gaussian):
    """A density of the user's own."""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OwnWrapper(2), "OwnVote"),
        (lambda: sample.Wrapper(2, OwnNoise(0.2)), "OwnNoise"),
        (lambda: sculpt.Wrapper(OwnDistribution()), "OwnDistribution"),
        (lambda: compose(vote.Wrapper(2), neo.Wrapper(density=OwnDensity())), "OwnDensity"),
    ],
)
def test_wrappers_of_the_users_own_are_given_and_never_imported(make: Any, says: str, tmp_path: Path) -> None:
    wrapped: Any = make()(net(1)).eval()
    if "neo" in wrapped.methods:
        wrapped.fit(X)
    save(wrapped, tmp_path / "model")
    with pytest.raises(ValueError, match=rf"{__name__}\.{says}.*wrapper="):
        load(tmp_path / "model", net(3))
    assert_same(load(tmp_path / "model", net(3), wrapper=make()).eval(), wrapped)
    never_imported = "turtledemo"
    text, tensors = contents(tmp_path / "model")
    rewrite(tmp_path / "model", json.dumps(text).replace(f"{__name__}.{says}", f"{never_imported}.{says}"), tensors)
    with pytest.raises(ValueError, match=never_imported):
        load(tmp_path / "model", net(3))
    assert not [name for name in sys.modules if never_imported in name]
