"""States of wrapped and of plain models load into a wrapped one, or a clear error is raised."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_models import (
    MAKERS,
    Net,
    X,
    answers,
    assert_reads_as,
    assert_same,
    every_wrapper,
    facts,
    net,
    wrapped_net,
)
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from workbench import NotFittedError, neo, sculpt, vote

# ---- states of the plain model ---------------------------------------------------------------------------------------


@every_wrapper
@pytest.mark.parametrize("fit", [False, True])
def test_a_plain_safetensors_file_loads_into_every_kind(name: str, fit: bool, tmp_path: Path) -> None:
    save_model(net(2), str(tmp_path / "model.safetensors"))  # writes tied weights once
    state = load_file(tmp_path / "model.safetensors")
    assert ("again.weight" in state) != ("middle.weight" in state)
    wrapped = wrapped_net(name, fit=fit)
    added = {key: value.clone() for key, value in wrapped.state_dict().items() if "@sculpt" in key or "@vote_" in key}
    assert str(wrapped.load_state_dict(state)) == "<All keys matched successfully>"
    assert_reads_as(wrapped, net(2), name)
    if name != "vote_sculpt":
        assert all(torch.equal(wrapped.state_dict()[key], value) for key, value in added.items())


@every_wrapper
def test_shards_load_after_they_are_put_together(name: str, tmp_path: Path) -> None:
    state = {key: value.clone() for key, value in net(2).state_dict().items()}
    names = sorted(state)
    save_file({key: state[key] for key in names[:5]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({key: state[key] for key in names[5:]}, tmp_path / "model-00002-of-00002.safetensors")
    wrapped = wrapped_net(name)
    wrapped.load_state_dict({key: value for file in tmp_path.iterdir() for key, value in load_file(file).items()})
    assert_reads_as(wrapped, net(2), name)


@every_wrapper
@pytest.mark.parametrize("prefixes", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_of_compiled_and_parallel_models_are_known(name: str, prefixes: str) -> None:
    wrapped = wrapped_net(name)
    wrapped.load_state_dict({prefixes + key: value for key, value in net(2).state_dict().items()})
    assert_reads_as(wrapped, net(2), name)
    other = wrapped_net(name, seed=3)
    other.load_state_dict({prefixes + key: value for key, value in wrapped.state_dict().items()})
    if "neo" not in wrapped.methods:
        assert_same(other, wrapped)
    assert facts(other) == facts(wrapped)


@pytest.mark.parametrize("outside", [nn.DataParallel, torch.compile])
def test_compiled_and_parallel_wrapped_models_load_what_they_saved(outside: Any) -> None:
    first, second = wrapped_net("vote_sculpt"), wrapped_net("vote_sculpt", seed=3)
    outside(second).load_state_dict(outside(first).state_dict())
    assert_same(first.cpu(), second.cpu())  # DataParallel moves a model to the GPU, if there is one


def test_a_part_that_is_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    wrapped: Any = vote.Wrapper(2)(Holder())
    plain = Holder()
    wrapped.load_state_dict(plain.state_dict())
    assert all(torch.equal(voter(X), plain(X)) for voter in wrapped.voters())


@every_wrapper
def test_a_plain_state_that_does_not_fit_changes_nothing(name: str) -> None:
    wrapped = wrapped_net(name)
    wrapped.scale(y_mean=torch.ones(1), y_scale=torch.full((1,), 2.0))
    before = facts(wrapped)
    state = net(2).state_dict()
    short = {key: value for key, value in state.items() if key != "last.bias"}
    for wrong, says in [
        (short, 'Missing key(s) in state_dict: "last.bias"'),
        ({**state, "zebra": torch.zeros(1)}, 'Unexpected key(s) in state_dict: "zebra"'),
        (net(2, 5).state_dict(), "size mismatch for first.weight"),
        ({}, "last.bias"),
    ]:
        with pytest.raises(RuntimeError, match=re.escape(says)):
            wrapped.load_state_dict(wrong)
        assert facts(wrapped) == before
    with pytest.raises(RuntimeError, match="strict=False loads what fits"):
        wrapped.load_state_dict(short)


@every_wrapper
def test_a_partial_plain_state_is_taken_as_far_as_it_goes(name: str) -> None:
    wrapped = wrapped_net(name)
    wrapped.scale(y_mean=torch.ones(1), y_scale=torch.full((1,), 2.0))
    old: Any = wrapped.voters()
    plain: Any = net(2)
    state = {key: value for key, value in plain.state_dict().items() if key != "last.weight"}
    missing, unexpected = wrapped.load_state_dict({**state, "zebra": torch.zeros(1)}, strict=False)
    assert (missing, unexpected) == (["last.weight"], ["zebra"])
    assert wrapped.scaling is not None  # not all weights are new, so the units still hold
    for voter, before in zip(wrapped.voters(), old, strict=True):
        assert torch.equal(voter.last.weight, before.last.weight)
        assert torch.equal(voter.last.bias, plain.last.bias)
        assert torch.equal(voter.norm.running_mean, plain.norm.running_mean)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: {"state_dict": state, "epoch": 3}, r"state\['state_dict'\]"),
        (lambda state: {f"net.model.{key}": value for key, value in state.items()}, r"begin with 'net\.model\.'"),
    ],
)
def test_what_to_do_about_names_that_do_not_fit_is_said(change: Any, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        wrapped_net("vote").load_state_dict(change(net(2).state_dict()))


def test_the_models_own_way_to_read_old_states_is_used() -> None:
    class Renamed(Net):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            for key in [key for key in state_dict if key.startswith(f"{prefix}old.")]:
                state_dict[key.replace("old.", "first.")] = state_dict.pop(key)
            super()._load_from_state_dict(state_dict, prefix, *args)

    plain = net(2)
    state = {key.replace("first.", "old."): value for key, value in plain.state_dict().items()}
    for name in ("vote", "sample", "vote_sculpt"):
        wrapped: Any = MAKERS[name]()(Renamed()).eval()
        wrapped.load_state_dict(state)
        assert all(torch.equal(voter(X), plain(X)) for voter in wrapped.voters())


def test_the_given_state_stays_as_it_was() -> None:
    state: Any = net(2).state_dict()
    kept, versions = copy.deepcopy(state), copy.deepcopy(state._metadata)
    for name in MAKERS:
        wrapped_net(name).load_state_dict(state)
    assert state.keys() == kept.keys()
    assert all(torch.equal(state[key], kept[key]) for key in kept)
    assert state._metadata == versions


# ---- states of wrapped models ----------------------------------------------------------------------------------------


@every_wrapper
@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_a_state_loads_right_after_wrapping_from_both_kinds_of_file(name: str, how: str, tmp_path: Path) -> None:
    wrapped = wrapped_net(name)
    wrapped.scale(x_mean=torch.ones(3), x_scale=torch.full((3,), 2.0))
    if how == "torch":
        torch.save(wrapped.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    else:
        save_file({key: value.clone() for key, value in wrapped.state_dict().items()}, tmp_path / "state")
        state = load_file(tmp_path / "state")  # knows no versions of modules
    other = wrapped_net(name, seed=3, fit=False)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert_same(other, wrapped)
    assert facts(other) == facts(wrapped)
    for mine, theirs in zip([*other.voters(), other.unwrap()], [*wrapped.voters(), wrapped.unwrap()], strict=True):
        assert torch.equal(mine(X), theirs(X))


def test_the_difference_of_settings_is_named_and_nothing_else() -> None:
    state = vote.Wrapper(3)(net(1)).state_dict()
    wrapped: Any = vote.Wrapper(4)(net(3))
    before = facts(wrapped)
    with pytest.raises(ValueError, match=r"vote: the state has n_voters=3, this object n_voters=4$"):
        wrapped.load_state_dict(state)
    with pytest.raises(ValueError, match="n_voters"):
        wrapped.load_state_dict(state, strict=False)
    whole = nn.ModuleDict({"part": wrapped})
    with pytest.raises(ValueError, match="n_voters"):
        whole.load_state_dict({f"part.{key}": value for key, value in state.items()}, strict=False)
    assert facts(wrapped) == before


def test_degrees_of_freedom_belong_to_a_state_and_not_to_a_name() -> None:
    source = sculpt.Wrapper(sculpt.StudentT(df=3.0))(net(1))
    state = source.state_dict()
    wrapped: Any = sculpt.Wrapper(sculpt.StudentT(df=9.0))(net(3))
    before = facts(wrapped)
    with pytest.raises(ValueError, match=r"sculpt: the state has df=3.0, this object df=9.0$"):
        wrapped.load_state_dict(state)
    assert facts(wrapped) == before
    for same in (3.0, 3, torch.tensor(3.0)):
        other: Any = sculpt.Wrapper(sculpt.StudentT(df=same))(net(3))
        other.load_state_dict(state)
        quantiles = [w.eval().predictive(X).icdf(0.99) for w in (source, other)]
        assert torch.allclose(*quantiles)
    start = [torch.nn.Parameter(torch.tensor(df)) for df in (4.0, 6.0)]
    learned: Any = [sculpt.Wrapper(sculpt.StudentT(df=df))(net(3)) for df in start]
    learned[0].load_state_dict(learned[1].state_dict())  # which holds the number
    assert learned[0].eval().predictive(X).family.df == 6
    key = next(key for key in state if key.startswith("settings@"))
    text = bytes(state[key].tolist()).replace(b'"df": 3.0, ', b"")
    assert b"df" not in text
    wrapped.load_state_dict({**state, key: torch.tensor(list(text), dtype=torch.uint8)})  # of an earlier version
    names = [repr(method) for method in wrapped._workbench.methods]  # also those of cells of sweeps
    assert names == ["sculpt(distribution=StudentT)"]


def test_a_setting_that_an_older_state_does_not_name_is_no_difference() -> None:
    state = wrapped_net("vote").state_dict()
    key = next(key for key in state if key.startswith("settings@"))
    text = bytes(state[key].tolist()).replace(b', "use_bias": true', b"")
    assert b"use_bias" not in text
    state[key] = torch.tensor(list(text), dtype=torch.uint8)
    other = wrapped_net("vote", seed=3)
    other.load_state_dict(state)
    assert_same(other, wrapped_net("vote"))
    del state[key]
    other = wrapped_net("vote", seed=3)
    other.load_state_dict(state)
    assert_same(other, wrapped_net("vote"))


@pytest.mark.parametrize(
    ("fewer", "lacking"),
    [("vote", {"sculpt"}), ("sculpt", set()), ("none", {"sculpt"})],
)
def test_a_state_of_fewer_methods_is_taken_as_far_as_it_goes(fewer: str, lacking: set[str]) -> None:
    source, wrapped = wrapped_net(fewer, seed=3), wrapped_net("vote_sculpt")
    heads = [wrapped.state_dict()[f"last.{at}@sculpt@vote"].clone() for at in ("weight", "bias")]
    if fewer != "none":
        with pytest.raises(
            ValueError, match=r"strict=False.*the state has no such method, this object n_voters|sculpt"
        ):
            wrapped.load_state_dict(source.state_dict())
    missing, unexpected = wrapped.load_state_dict(source.state_dict(), strict=False)
    assert {key.split("@")[1] for key in missing} <= lacking
    assert not unexpected
    voters = source.voters() * (3 // len(source.voters()))
    assert all(torch.equal(a(X), b(X)) for a, b in zip(wrapped.voters(), voters, strict=True))
    if fewer == "sculpt":
        expected = answers(source)
        y, risk = wrapped(X[:6], return_risk=True)
        assert torch.allclose(y, expected[0], atol=1e-6)
        assert torch.allclose(risk.aleatoric, expected[1], atol=1e-6)
    else:
        now = [wrapped.state_dict()[f"last.{at}@sculpt@vote"] for at in ("weight", "bias")]
        assert all(torch.equal(a, b) for a, b in zip(heads, now, strict=True))


def test_a_state_of_more_methods_says_what_it_has_beside() -> None:
    source, wrapped = wrapped_net("vote_sculpt", seed=3), wrapped_net("vote")
    with pytest.raises(ValueError, match=r"sculpt: the state has distribution='Normal'.*, this object no such method"):
        wrapped.load_state_dict(source.state_dict())
    missing, unexpected = wrapped.load_state_dict(source.state_dict(), strict=False)
    assert not missing
    assert unexpected
    assert all("@sculpt@vote" in key for key in unexpected)
    assert all(torch.equal(a(X), b(X)) for a, b in zip(wrapped.voters(), source.voters(), strict=True))


@pytest.mark.slow
def test_a_part_of_a_larger_model_loads_with_it() -> None:
    for name in MAKERS:
        whole = nn.Sequential(nn.Linear(3, 3), wrapped_net(name)).eval()
        other: Any = nn.Sequential(nn.Linear(3, 3), wrapped_net(name, seed=3, fit=False)).eval()
        other.load_state_dict(whole.state_dict())
        assert_same(other[1], whole[1])
        plain = nn.Sequential(nn.Linear(3, 3), net(2)).eval()
        other.load_state_dict(plain.state_dict())
        assert_reads_as(other[1], net(2), name)
        short = {key: value for key, value in plain.state_dict().items() if key != "1.last.bias"}
        missing, _ = other.load_state_dict({**short, "1.last.weight": torch.ones(2, 4)}, strict=False)
        assert missing == ["1.last.bias"]
        if name != "rank1":
            assert all(torch.equal(voter.last.weight, torch.ones(2, 4)) for voter in other[1].voters())


@every_wrapper
def test_a_part_of_a_larger_model_has_a_state_for_torchs_distributed_checkpoints(name: str) -> None:
    whole, other = (nn.ModuleDict({"part": wrapped_net(name, seed=seed)}).eval() for seed in (1, 3))
    state = get_model_state_dict(whole)
    assert state.keys() == whole.state_dict().keys()
    set_model_state_dict(other, state)
    assert_same(other["part"], whole["part"])


def test_an_assigned_state_shows_everywhere() -> None:
    for name in MAKERS:
        wrapped = wrapped_net(name, seed=3)
        wrapped.load_state_dict(net(2).state_dict(), assign=True)
        assert_reads_as(wrapped, net(2), name)
        wrapped.load_state_dict(wrapped_net(name).state_dict(), assign=True)
        assert_same(wrapped, wrapped_net(name))


# ---- neo's signature -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["neo", "flow", "all"])
def test_signatures_go_from_fitted_to_unfitted_and_back(name: str) -> None:
    fitted, unfitted = wrapped_net(name), wrapped_net(name, fit=False)
    empty, full = (copy.deepcopy(wrapped.state_dict()) for wrapped in (unfitted, fitted))
    unfitted.load_state_dict(full)
    assert_same(unfitted, fitted)
    fitted.load_state_dict(empty)
    with pytest.raises(NotFittedError):
        fitted(X, return_risk=True)
    assert facts(fitted) == {key: value.tolist() for key, value in empty.items()}
    fitted.fit(X)
    assert_same(fitted, unfitted)
    other = wrapped_net(name, seed=3).fit(X[:, [2, 0, 1]])
    other.load_state_dict(full)
    assert_same(other, unfitted)


def test_a_signature_of_other_layers_replaces_the_one_that_was_there() -> None:
    class Branches(nn.Module):
        """Which layer answers depends on the input."""

        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
            self.last = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.small(x) if x.mean() < 0 else self.large(x))

    model = Branches()
    first: Any = neo.Wrapper()(model)
    second: Any = neo.Wrapper()(model)
    first.eval().fit(X - 9)
    second.eval().fit(X + 9)
    low, high = answers(first, X - 9), answers(second, X + 9)
    state = copy.deepcopy(first.state_dict())
    first.load_state_dict(second.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(answers(first, X + 9), high, strict=True))
    second.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(answers(second, X - 9), low, strict=True))


def test_a_signature_does_not_outlive_the_weights_that_it_was_learned_with() -> None:
    wrapped = wrapped_net("neo")
    before = answers(wrapped)
    wrapped.load_state_dict(net(1).state_dict())  # the same weights
    assert all(torch.equal(a, b) for a, b in zip(answers(wrapped), before, strict=True))
    wrapped.load_state_dict(net(2).state_dict())
    with pytest.raises(NotFittedError, match="fit"):
        wrapped(X, return_risk=True)
    assert_same(wrapped.fit(X), MAKERS["neo"]()(net(2)).eval().fit(X))


def test_a_pickled_state_holds_tensors_only() -> None:
    for name in MAKERS:
        file = io.BytesIO()
        torch.save(wrapped_net(name).state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert all(type(value) is Tensor for value in state.values())


# ---- layers that write their state themselves ------------------------------------------------------------------------


class WritesItself(nn.Module):
    """As the linear layers of torch_geometric do, which know no voters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()


@pytest.mark.parametrize("outer", [False, True])
def test_the_state_of_a_layer_that_writes_it_itself_has_the_voters(outer: bool) -> None:
    def made() -> Any:
        model = vote.Wrapper(3)(nn.Sequential(nn.Linear(3, 3), WritesItself()))
        return nn.Sequential(model, nn.Linear(1, 1)) if outer else model

    one, other, x = made(), made(), torch.randn(4, 3)
    state = one.state_dict()
    stem = "0.1.weight" if outer else "1.weight"
    assert stem not in state
    assert not state[f"{stem}@vote"].requires_grad
    assert one.state_dict(keep_vars=True)[f"{stem}@vote"] is one.get_parameter(f"{stem}@vote")
    other.load_state_dict(state)
    assert torch.equal(one.eval()(x), other.eval()(x))
    plain = nn.Sequential(nn.Linear(3, 3), WritesItself())
    if not outer:
        other.load_state_dict(plain.state_dict())
        torch.testing.assert_close(other(x), plain(x))
