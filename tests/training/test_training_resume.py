"""How a training ends (best weights, patience, Ctrl-C), and how it resumes from a checkpoint."""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.full_disk import limited_files
from helpers.training_models import (
    WRAPPERS,
    Interrupt,
    interrupt_after,
    net,
    options,
    plain,
    plane,
    quiet,
    same,
    weights,
)
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import compose, laplace, sample, sculpt, swag, vote
from workbench.errors import WorkbenchWarning
from workbench.training import checkpoint as checkpoint_module
from workbench.training.described_settings import CODE
from workbench.training.function_code import fingerprint


def test_the_best_weights_come_back_and_patience_ends_the_training() -> None:
    x, y = plane(40)
    seen: list[dict[str, Tensor]] = []

    class Worse(nn.Module):
        """A validation loss that is least in epoch 3, whatever the model does."""

        def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
            if not prediction.requires_grad:
                seen.append(weights(wrapped))
                return torch.tensor([5.0, 4.0, 1.0, 2.0, 3.0, 2.5, 2.0][len(seen) - 1])
            return F.mse_loss(prediction, target)

    wrapped = plain()
    history = quiet(wrapped, (x, y), epochs=7, criterion=Worse(), patience=3)
    assert history.best_epoch == 3
    assert list(history.frame.epoch) == [1, 2, 3, 4, 5, 6]
    assert same(weights(wrapped), seen[2])
    assert not same(seen[2], seen[5])


def test_ctrl_c_leaves_a_usable_model_with_its_best_weights() -> None:
    wrapped, other = plain(), plain()
    x, y = plane(40)  # 2 batches and a validation: 3 losses an epoch
    with pytest.warns(WorkbenchWarning, match="interrupted after 2 of 9 epochs"):
        history = quiet(wrapped, (x, y), epochs=9, criterion=Interrupt(8), batch_size=18)
    assert history.interrupted
    assert "interrupted" in repr(history)
    assert len(history.frame) == 2
    assert not wrapped.training

    states: list[dict[str, Tensor]] = []

    def spy(prediction: Tensor, target: Tensor) -> Tensor:
        if not prediction.requires_grad:
            states.append(weights(other))
        return F.mse_loss(prediction, target)

    quiet(other, (x, y), epochs=9, criterion=spy, batch_size=18)
    assert same(weights(wrapped), states[history.best_epoch - 1])
    with pytest.warns(WorkbenchWarning, match="after 0 of 9 epochs"):
        assert quiet(plain(), (x, y), epochs=9, criterion=Interrupt(2), batch_size=18).best_epoch == 0


@pytest.mark.parametrize("name", ["plain", "sample", "vote of sculpt", "neo"])
def test_a_resumed_training_ends_in_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    x, y = plane(60)
    first = WRAPPERS[name]()(net(dropout=0.2))
    start = weights(first)
    whole = quiet(first, (x, y), epochs=5, batch_size=16, validation=0.2)

    def model(garbled: bool) -> Any:
        wrapped = WRAPPERS[name]()(net(dropout=0.2, seed=9 if garbled else 0))
        if not garbled:
            wrapped.load_state_dict(start)
        return wrapped

    path = tmp_path / "folder" / "state.pt"
    interrupt_after(3, monkeypatch)
    with pytest.warns(WorkbenchWarning, match="interrupted after 3 of 5"):
        quiet(model(False), (x, y), epochs=5, batch_size=16, validation=0.2, checkpoint=path)
    resumed = model(True)  # other weights: the file has the right ones
    history = quiet(resumed, (x, y), epochs=5, batch_size=16, validation=0.2, checkpoint=path)
    assert history.frame.drop(columns="seconds").equals(whole.frame.drop(columns="seconds"))
    assert same(weights(resumed), weights(first))
    again = model(True)
    assert len(quiet(again, (x, y), epochs=5, batch_size=16, validation=0.2, checkpoint=path).frame) == 5
    assert same(weights(again), weights(first))
    assert [file.name for file in path.parent.iterdir()] == ["state.pt"]


def test_going_on_with_the_interrupted_object_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    path = tmp_path / "state.pt"
    wrapped, straight = plain(), plain()
    criterion = Interrupt(8)
    with pytest.warns(WorkbenchWarning, match="interrupted after 2"):
        quiet(wrapped, plane(40), epochs=4, batch_size=18, checkpoint=path, criterion=criterion, standardize=True)
    quiet(wrapped, plane(40), epochs=4, batch_size=18, checkpoint=path, criterion=criterion, standardize=True)
    quiet(straight, plane(40), epochs=4, batch_size=18, standardize=True)
    assert same(weights(wrapped), weights(straight))


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    quiet(plain(), plane(40), epochs=2, checkpoint=path)
    x, y = plane(40)
    wrapped = plain()
    start = weights(wrapped)
    for kwargs, rows, message in (
        ({"epochs": 3}, (x, y), "epochs: 2 in the file, 3 here"),
        ({"seed": 1}, (x, y), "seed: 0 in the file, 1 here"),
        ({"lr": 0.1}, (x, y), "optimizer"),
        ({}, (x, y + 1), "data"),
    ):
        with pytest.raises(ValueError, match=message):
            quiet(wrapped, rows, **options(checkpoint=path, **kwargs))
    with pytest.raises(ValueError, match="another model"):
        quiet(compose()(nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))), (x, y), epochs=2, checkpoint=path)
    assert same(weights(wrapped), start)
    path.write_text("something else")
    with pytest.raises(ValueError, match="not a checkpoint"):
        quiet(wrapped, (x, y), epochs=2, checkpoint=path)
    assert path.read_text() == "something else"


@pytest.mark.parametrize(
    ("stored", "here", "message"),
    [
        (sculpt.Wrapper(sculpt.Normal(beta=0.5)), sculpt.Wrapper(), r"Normal\(beta=0.5.* in the file, .* here"),
        (sculpt.Wrapper(), sculpt.Wrapper(sculpt.StudentT(df=4.0)), "StudentT"),
        (sculpt.Wrapper(sculpt.StudentT(df=4.0)), sculpt.Wrapper(sculpt.StudentT(df=30.0)), "df=4.0.*df=30.0"),
        (vote.Wrapper(2, finetune=True), vote.Wrapper(2), "finetune=True"),
        (swag.Wrapper(3, start=0.2), swag.Wrapper(3, start=0.3), "start=0.2.*start=0.3"),
        (sample.Wrapper(2, randomness="same"), sample.Wrapper(2), "randomness"),
    ],
)
def test_a_checkpoint_of_a_wrapper_that_trains_otherwise_is_refused(
    stored: Any, here: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "state.pt"
    quiet(stored(net()), plane(40), epochs=5, checkpoint=path)
    wrapped = here(net())
    start = weights(wrapped)
    with pytest.raises(ValueError, match=message):
        quiet(wrapped, plane(40), epochs=5, checkpoint=path)
    assert same(weights(wrapped), start)


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        (vote.Wrapper(2, chunk=1), vote.Wrapper(2)),  # another way to the same numbers
        (laplace.Wrapper(prior_precision=2.0), laplace.Wrapper()),  # only counts after the training
        (sculpt.Wrapper(sculpt.Normal), sculpt.Wrapper(sculpt.Normal())),
    ],
)
def test_a_checkpoint_does_not_ask_for_settings_that_do_not_train(stored: Any, here: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    quiet(stored(net()), plane(40), epochs=2, checkpoint=path)
    quiet(here(net()), plane(40), epochs=2, checkpoint=path)


@pytest.mark.slow
def test_degrees_of_freedom_learned_so_far_do_not_make_another_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    wrapper = sculpt.Wrapper(sculpt.StudentT(df=nn.Parameter(torch.tensor(5.0))))
    wrapped = wrapper(net())
    interrupt_after(2, monkeypatch)
    with pytest.warns(WorkbenchWarning, match="interrupted after 2"):
        quiet(wrapped, plane(40), epochs=4, checkpoint=tmp_path / "state.pt")
    quiet(wrapper(net()), plane(40), epochs=4, checkpoint=tmp_path / "state.pt")


def test_a_checkpoint_written_before_it_held_the_settings_of_wrappers_resumes(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    make = partial(vote.Wrapper(2, finetune=True), net())
    quiet(make(), plane(40), epochs=2, checkpoint=path)
    state = torch.load(path, weights_only=True)
    del state["settings"]["wrapper settings"]
    torch.save(state, path)
    assert len(quiet(make(), plane(40), epochs=2, checkpoint=path).frame) == 2


def test_a_full_disk_is_told_by_name(tmp_path: Path) -> None:
    path, wrapped = tmp_path / "training", plain()
    with limited_files(100), pytest.warns(WorkbenchWarning, match=f"too large: '{path}'"):
        quiet(wrapped, plane(), **options(checkpoint=path))
    assert os.listdir(tmp_path) == []
    quiet(other := plain(), plane(), **options())
    assert same(weights(wrapped), weights(other))


@pytest.mark.parametrize("folds", [None, 2])
@pytest.mark.parametrize("epoch", [1, 3])
def test_a_folder_that_vanishes_costs_no_training(
    epoch: int, folds: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    folder, rows = tmp_path / "folder", plane(40)
    wrapped, other = (vote.Wrapper(2)(net()) for _ in range(2))

    def vanish(progress: Any) -> None:
        if progress.epoch == epoch and progress.epoch_ended and folder.is_dir():
            shutil.rmtree(folder)
            folder.touch()  # where it was, no folder can be made

    with pytest.warns(
        WorkbenchWarning, match=r"checkpoint: .*state\.pt.* can't be written \(.*folder'\).*goes on.*folder"
    ):
        history = quiet(wrapped, rows, epochs=3, folds=folds, checkpoint=folder / "state.pt", callback=vanish)
    assert len(history.frame) == 3
    quiet(other, rows, epochs=3, folds=folds)
    assert same(weights(wrapped), weights(other))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path, rows = tmp_path / "checkpoint", plane(40)
    first = plain()
    quiet(first, rows, epochs=2, checkpoint=path)
    whole, draw = path.read_bytes(), random.Random(0)
    with zipfile.ZipFile(path) as archive:
        data = archive.getinfo(next(name for name in archive.namelist() if name.endswith("data/0")))
    inside = [(data.header_offset + 30 + len(data.filename) + 64 + k, k) for k in range(0, data.file_size - 64, 48)]
    for place, bit in [*inside, *((draw.randrange(len(whole)), draw.randrange(8)) for _ in range(12))]:
        torn = bytearray(whole)
        torn[place] ^= 1 << bit % 8
        path.write_bytes(torn)
        wrapped = plain()
        before = weights(wrapped)
        try:
            quiet(wrapped, rows, epochs=2, checkpoint=path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
            assert same(weights(wrapped), before)
        else:  # what lies between the parts, and changes nothing
            assert same(weights(wrapped), weights(first)), place
    state = torch.load(io.BytesIO(whole), weights_only=True)
    for name in ("model", "optimizer", "best", "records", "generators", "steps"):
        for change in ({key: value for key, value in state.items() if key != name}, {**state, name: "text"}):
            torch.save(change, path)
            wrapped = plain()
            before = weights(wrapped)
            with pytest.raises(ValueError, match=r"checkpoint: .* is of another model, or damaged"):
                quiet(wrapped, rows, epochs=2, checkpoint=path)
            assert same(weights(wrapped), before)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a checkpoint of a training"):
        quiet(plain(), rows, epochs=2, checkpoint=path)


@pytest.mark.parametrize("path", ["", ".", "folder"])
def test_a_folder_as_checkpoint_is_not_to_be_deleted(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    wrapped = plain()
    before = weights(wrapped)
    with pytest.raises(
        ValueError, match=f"^checkpoint: {re.escape(path or '.')} is a folder; give the path of a file$"
    ):
        quiet(wrapped, plane(40), epochs=2, checkpoint=path)
    assert same(weights(wrapped), before)


@pytest.mark.parametrize("folds", [None, 2])
def test_a_checkpoint_that_cannot_be_written_is_refused_before_the_training(folds: int | None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrapped = vote.Wrapper(2)(nn.Linear(2, 1))
    before, calls = weights(wrapped), []
    with pytest.raises(ValueError, match=r"^checkpoint: .*model\.pt can't be written \(.*file'\); give a path in a"):
        quiet(wrapped, plane(40), folds=folds, checkpoint=tmp_path / "file" / "model.pt", callback=calls.append)
    assert same(weights(wrapped), before)
    assert not calls


def loss_of(factor: float, power: int = 2, calls: int = 0) -> Any:
    def criterion(prediction: Tensor, target: Tensor) -> Tensor:
        """Counts its calls."""
        nonlocal calls
        calls += 1
        return factor * (prediction - target).abs().pow(power).mean()

    return criterion


@pytest.mark.parametrize("other", ["code", "constant", "closure", "augment"])
def test_functions_of_one_name_and_other_code_are_told_apart(other: str, tmp_path: Path) -> None:
    data, path = plane(40), tmp_path / "training.pt"
    losses: dict[str, tuple[Any, Any]] = {
        "code": (lambda p, t: (p - t).square().mean(), lambda p, t: (p - t).abs().mean()),
        "constant": (lambda p, t: 2 * F.mse_loss(p, t), lambda p, t: 3 * F.mse_loss(p, t)),
        "closure": (loss_of(1.0), loss_of(2.0)),
        "augment": (F.mse_loss, F.mse_loss),
    }
    changes = [lambda x, y, _: (x, y), lambda x, y, _: (-x, y)] if other == "augment" else [None, None]
    quiet(plain(), data, epochs=2, checkpoint=path, criterion=losses[other][0], augment=changes[0])
    with pytest.raises(ValueError, match=r"of another training \(code of functions: Python .* in the file"):
        quiet(plain(), data, epochs=2, checkpoint=path, criterion=losses[other][1], augment=changes[1])


@pytest.mark.slow
def test_equal_functions_resume_also_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a function does not depend on its address, its line, the hashes of texts, or what it has counted."""
    first, again = loss_of(1.0), loss_of(1.0)
    again(torch.ones(1), torch.zeros(1))
    assert fingerprint([first]) == fingerprint([again]) != fingerprint([loss_of(1.0, 3)])
    # functions of packages, and what its repr describes, have no code of their own
    assert fingerprint([F.mse_loss]) == fingerprint([nn.MSELoss()]) == fingerprint([None])
    code = "\n" * 5 + (
        "from workbench.training.function_code import fingerprint\n"
        "def outer(k):\n    return lambda p, t, m=2: sum(k for name in ('a', 'b') if name in {'a', 'b', 'c'})\n"
        "print(fingerprint([outer(3)]))\n"
    )
    texts = set()
    for seed in ("1", "2", "3"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, sys.path))),
        }
        texts.add(
            subprocess.run(
                [sys.executable, "-c", code + "#" * int(seed)],
                capture_output=True,
                text=True,
                env=environment,
                check=True,
            ).stdout
        )
    assert len(texts) == 1
    path = tmp_path / "training.pt"
    quiet(plain(), plane(40), epochs=2, checkpoint=path, criterion=first)
    quiet(plain(), plane(40), epochs=2, checkpoint=path, criterion=again)
    state = torch.load(path, weights_only=True)
    for stored in ("Python 2.7 0123", None):  # of another version of Python, and of an earlier version of workbench
        state["settings"] |= {CODE: stored}
        if stored is None:
            del state["settings"][CODE]
        torch.save(state, path)
        quiet(plain(), plane(40), epochs=2, checkpoint=path, criterion=loss_of(2.0))
