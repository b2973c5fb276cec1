"""Damaged files raise a ValueError that names them, and a refused load changes nothing."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_files import contents, rewrite
from helpers.checkpoint_models import answers, assert_same, facts, net, wrapped_net
from torch import nn

from workbench import compose, laplace, sculpt, snapshot, swag, vote
from workbench.core.saving.files import load, save


def as_before(path: Path) -> None:
    """Make a file one of the version before there were checksums."""
    text, tensors = contents(path)
    del text["checksums"]
    rewrite(path, {**text, "version": 1}, tensors, signed=False)


def attempt(path: Path, model: Any) -> tuple[Any, Exception | None]:
    """The loaded model, or what was raised."""
    try:
        return load(path, model), None
    except Exception as error:
        return None, error


def refused(path: Path, model: Any, says: str = "") -> None:
    """A load raises one ValueError that names the file, and leaves the model as it was."""
    before, mode = facts(model), model.training
    held = [(p, p.requires_grad, p.dtype) for p in model.parameters()]
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load(path, model)
    assert type(caught.value) is ValueError
    assert re.search(says, str(caught.value)), str(caught.value)
    assert facts(model) == before
    assert model.training is mode
    assert all(
        a is p and flag == p.requires_grad and dtype == p.dtype
        for p, (a, flag, dtype) in zip(model.parameters(), held, strict=True)
    )


@pytest.mark.parametrize("name", ["neo", "flow", "all", "vote_sculpt"])
@pytest.mark.parametrize("old", [False, True])
def test_a_refused_load_changes_nothing(name: str, old: bool, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(wrapped_net(name), path)
    if old:
        as_before(path)
    text, tensors = contents(path)
    last = list(tensors)[-1]  # as late as can be
    density = next((key for key in tensors if "density" in key), last)
    for change, says in [
        ({key: value for key, value in tensors.items() if key != density}, re.escape(density)),
        ({key: value for key, value in tensors.items() if key != last}, re.escape(last)),
        ({**tensors, "zebra": torch.zeros(1)}, "zebra"),
        ({**tensors, "first.bias@zebra": torch.zeros(4)}, "zebra"),
        ({**tensors, last: torch.zeros(7, 7, 7)}, re.escape(last)),
        (
            {
                **tensors,
                "norm.running_mean" + "@vote" * ("norm.running_mean@vote" in tensors): torch.zeros(
                    4, dtype=torch.int64
                ),
            },
            "running_mean",
        ),
    ]:
        rewrite(path, text, change, signed=not old)
        refused(path, net(3), says if not old else "")
        other = wrapped_net(name, seed=3)
        kept = answers(other)
        refused(path, other)
        assert all(torch.equal(a, b) for a, b in zip(answers(other), kept, strict=True))


FLIPPED: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(2),
    "rank1_sculpt": lambda: compose(vote.Wrapper(2, share="rank1"), sculpt.Wrapper(n_layers=1)),
    "neo": lambda: wrapped_net("neo"),
    "all": lambda: wrapped_net("all"),
    "swag": lambda: swag.Wrapper(2, rank=2),
    "laplace": lambda: laplace.Wrapper(),
}


@pytest.mark.parametrize("name", FLIPPED)
def test_a_flipped_bit_is_refused_or_changes_nothing(name: str, tmp_path: Path) -> None:
    path, made = tmp_path / "model", FLIPPED[name]()
    wrapped: Any = made if isinstance(made, nn.Module) else made(net(1)).eval()
    save(wrapped, path)
    whole = path.read_bytes()
    state = copy.deepcopy(wrapped.state_dict())
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(name)
    flips = [(draw.randrange(8, header) if k % 2 else draw.randrange(len(whole)), draw.randrange(8)) for k in range(50)]
    for place, bit in [*flips, *((i, b) for i in range(8) for b in (0, 7))]:
        torn = bytearray(whole)
        torn[place] ^= 1 << bit
        path.write_bytes(torn)
        model = net(3)
        before = facts(model)
        loaded, error = attempt(path, model)
        if error is not None:
            assert type(error) is ValueError, error
            assert str(path) in str(error)
            assert facts(model) == before
            continue
        assert type(loaded) is type(wrapped)
        assert loaded.methods == wrapped.methods
        assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items()), (place, bit)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(wrapped_net("vote_sculpt"), path)
    whole = path.read_bytes()
    model = net(3)
    for length in [*range(0, len(whole), len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path, model, "not a safetensors file")
    path.write_bytes(whole + b"\0" * 8)
    refused(path, model)


def put(text: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """A copy of a text with another value at a place such as `parts//methods/vote`."""
    new = copy.deepcopy(text)
    *path, last = place.split("/")
    inner = new
    for step in path:
        inner = inner[step]
    inner[last] = value
    return new


PART, VOTE = "parts//", "parts//methods/vote/arguments/"


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("version", -1, "version=-1"),
        ("version", True, "version=True"),
        ("version", "1", "version='1'"),
        ("version", 99, "newer workbench .format 99"),
        ("parts", [], "parts"),
        ("parts", {"": 3}, "parts"),
        ("parts", {}, "parts"),
        ("complex", ["zebra"], "complex.*zebra"),
        ("complex", None, "complex"),
        ("model", 3, "model"),
        (PART + "strategy", "warp", "strategy.*warp"),
        (PART + "purity", 3, "purity"),
        (PART + "chunk", -2, "chunk"),
        (PART + "rows", "many", "rows"),
        (PART + "rows", -1, "rows"),
        (PART + "output", "sounds", "output"),
        (PART + "method", "dream", "dream"),
        (PART + "method", None, "method"),
        (PART + "methods", {"zebra": {"arguments": {}}}, "zebra"),
        (PART + "methods", {"vote": 3}, "vote"),
        (PART + "methods", None, "methods"),
        (VOTE + "n_voters", 100_000, "100000 members.*those of 3"),
        (VOTE + "n_voters", 0, "n_voters.*not 0"),
        (VOTE + "n_voters", "3", "n_voters"),
        (VOTE + "n_voters", 3.5, "n_voters"),
        (VOTE + "alpha", float("nan"), "alpha"),
        (VOTE + "alpha", 10**400, "alpha"),
        (VOTE + "share", "rank2", "share"),
        (VOTE + "colour", "red", "colour"),
        ("parts//methods/sculpt/arguments/distribution", {"class": "Zebra"}, "Zebra"),
        ("parts//methods/sculpt/arguments/distribution", {"class": "Normal", "stripes": 3}, "stripes"),
        ("parts//methods/sculpt/arguments/n_layers", 10**9, "n_layers"),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_wrong_settings_are_refused(place: str, value: Any, says: str, old: bool, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(wrapped_net("vote_sculpt"), path)
    if old:
        as_before(path)
    text, tensors = contents(path)
    rewrite(path, put(text, place, value), tensors, signed=not old)
    refused(path, net(3), says)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "3", "{", "[" * 10_000, '{"version": 2}', "\ud800".encode("utf-8", "replace").decode()]
)
def test_garbage_in_place_of_the_settings_is_refused(text: str, tmp_path: Path) -> None:
    for signed in (True, False):
        rewrite(tmp_path / "model", text, net(1).norm.state_dict(), signed)
        refused(tmp_path / "model", net(3))


@pytest.mark.parametrize("make", [lambda: swag.Wrapper(3, rank=2), lambda: snapshot.Wrapper(3)])
def test_sizes_of_kept_weights_must_be_those_of_the_file(make: Callable[[], Any], tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(make()(net(1)), path)
    text, tensors = contents(path)
    (name,) = text["parts"][""]["methods"]
    load(path, net(3))
    for setting in {"n_samples", "n_snapshots", "rank"} & text["parts"][""]["methods"][name]["arguments"].keys():
        rewrite(path, put(text, f"parts//methods/{name}/arguments/{setting}", 10**7), tensors)
        refused(path, net(3), "10000000")


@pytest.mark.parametrize("name", ["vote", "all", "sculpt", "flow"])
def test_files_without_checksums_load(name: str, tmp_path: Path) -> None:
    path, wrapped = tmp_path / "model", wrapped_net(name)
    save(wrapped, path)
    as_before(path)
    other = load(path, net(3)).eval()
    assert facts(other) == facts(wrapped)
    assert_same(other, wrapped)


@pytest.mark.parametrize(
    "settings",
    [
        torch.zeros(3),
        torch.tensor([255, 254], dtype=torch.uint8),
        torch.tensor(list(b"[1]"), dtype=torch.uint8),
        torch.tensor(list(b'{"vote": 3}'), dtype=torch.uint8),
        "text",
        None,
    ],
)
def test_a_state_with_damaged_settings_is_refused(settings: Any) -> None:
    wrapped = wrapped_net("vote")
    before = facts(wrapped)
    state = {**wrapped_net("vote", seed=2).state_dict(), "settings@workbench": settings}
    if settings is None:  # a state of which nobody says what made it
        del state["settings@workbench"]
        wrapped.load_state_dict(state)
        return
    with pytest.raises(ValueError, match="settings@workbench in the state"):
        wrapped.load_state_dict(state)
    assert facts(wrapped) == before


@pytest.mark.parametrize("name", ["vote", "rank1", "sculpt", "all", "flow"])
def test_a_state_that_does_not_fit_changes_nothing(name: str) -> None:
    wrapped, other = wrapped_net(name), wrapped_net(name, seed=2)
    before, kept, state = facts(wrapped), answers(wrapped), other.state_dict()
    for key in list(state)[:-1:4]:
        for value in (None, torch.zeros(9, 9, 9), "text"):
            wrong = {**state, key: value}
            if value is None:
                del wrong[key]
            try:
                wrapped.load_state_dict(wrong)
            except (RuntimeError, ValueError):
                assert facts(wrapped) == before, (key, value)
                assert all(torch.equal(a, b) for a, b in zip(answers(wrapped), kept, strict=True))
            else:  # a density that is not there is one that was not learned; one of two names of a tensor
                wrapped = wrapped_net(name)
