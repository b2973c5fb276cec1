"""`fit(strategy="ddp")`: two processes train the model that one process would, with the same batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.two_processes import in_two_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench import compose, fit, neo, sample, sculpt, swag, vote

WRAPPERS = {
    "plain": compose,
    "vote_sculpt": lambda: compose(vote.Wrapper(2), sculpt.Wrapper()),
    "swag": lambda: swag.Wrapper(n_samples=2, rank=2, start=0.3),
    "neo": neo.Wrapper,
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def rows(n: int = 45) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, n)[:, None]
    return x, 3 * torch.sin(2 * x) + 1


def wrapped(name: str, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return WRAPPERS[name]()(nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)))


def train(model: Any, data: Any = None, **more: Any) -> Any:
    """In float64, where another order of sums shows in the last digits only; the last batch of 40 rows by 16 has 8, or 9 of 41."""
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 16, "dtype": torch.float64, "progress": False, **more}
    return fit(model, rows() if data is None else data, **settings)


def alike(tensor: Tensor) -> None:
    """The same numbers in both processes."""
    tensor = tensor.detach().to(torch.float64).contiguous()
    others = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(others, tensor)
    assert torch.equal(*others)


def _trained(rank: int, folder: str) -> None:
    for name in WRAPPERS:
        for held in (0.1, 0) if name == "plain" else (0.1,):
            alone, both = wrapped(name), wrapped(name, seed=rank)  # all begin as the first does
            one, two = train(alone, validation=held), train(both, validation=held, strategy="ddp")
            assert [r[0] for r in one.records] == [r[0] for r in two.records]
            for here, there in zip(one.records, two.records, strict=True):
                torch.testing.assert_close(
                    torch.tensor(there[1:4]), torch.tensor(here[1:4]), rtol=1e-8, atol=1e-10, equal_nan=True
                )
            assert one.best_epoch == two.best_epoch
            wanted = alone.state_dict()
            for key, value in both.state_dict().items():
                alike(value)
                if value.is_floating_point():
                    torch.testing.assert_close(
                        value, wanted[key], rtol=1e-6, atol=1e-8, msg=lambda m, at=(name, key): f"{at}: {m}"
                    )
            assert not both.training


def _unlabelled(rank: int) -> None:
    """Rows without a class: of some batches one process has none with one."""
    x, labels = rows()
    labels = (labels[:, 0] > 1).long().where(torch.arange(45) % 7 < 2, -100)
    models = []
    for strategy in (None, "ddp"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = compose(vote.Wrapper(2, output="logits"), sculpt.Wrapper())(nn.Linear(1, 2))
        history = train(model, (x, labels), batch_size=6, validation=(x, labels), strategy=strategy)
        models.append((model, history))
    (alone, one), (both, two) = models
    for here, there in zip(one.records, two.records, strict=True):
        torch.testing.assert_close(torch.tensor(there[1:4]), torch.tensor(here[1:4]), rtol=1e-8, atol=1e-10)
    for here, there in zip(alone.parameters(), both.parameters(), strict=True):
        alike(there)
        torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_two_processes_train_the_model_of_one(tmp_path: Path) -> None:
    in_two_processes(_trained, tmp_path, str(tmp_path))


@pytest.mark.slow
def test_rows_without_a_class_count_in_no_process(tmp_path: Path) -> None:
    in_two_processes(_unlabelled, tmp_path)


def _more(rank: int, folder: str) -> None:
    # noise is drawn in each process, and the weights are the same all the same
    noisy = sample.Wrapper()(nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)))
    state = torch.get_rng_state()
    train(noisy, strategy="ddp", batch_size=3)  # the last batch of 40 has one row more
    for parameter in noisy.parameters():
        alike(parameter)
    assert torch.equal(torch.get_rng_state(), state)

    # a parameter that no prediction uses stays as it is
    class Idle(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.idle = nn.Parameter(torch.ones(1))

    idle = compose()(Idle())
    train(idle, strategy="ddp", weight_decay=0.1)
    assert idle.idle.item() == 1

    # a training that was broken off goes on to the same weights
    def stop(progress: Any) -> bool:
        assert rank == 0, "the first process alone is watched"
        return progress.epoch_ended and progress.epoch == 2

    path = Path(folder) / "state"
    broken, whole = wrapped("plain"), wrapped("plain")
    history = train(broken, strategy="ddp", callback=stop, checkpoint=path, epochs=4)
    assert (history.interrupted, len(history.records)) == (True, 2)
    dist.barrier()
    train(broken, strategy="ddp", checkpoint=path, epochs=4)
    train(whole, strategy="ddp", epochs=4)
    for here, there in zip(broken.parameters(), whole.parameters(), strict=True):
        assert torch.equal(here, there)

    # what does not fit is told in every process
    model = wrapped("plain")
    with pytest.raises(ValueError, match="processes 0 and 1 were given different data"):
        train(model, rows(45 + rank), validation=0, strategy="ddp")
    with pytest.raises(ValueError, match="different epochs"):
        train(model, epochs=1 + rank, strategy="ddp")
    loader = DataLoader(TensorDataset(*rows()), batch_size=8)
    with pytest.raises(TypeError, match="rather than a DataLoader"):
        fit(model, loader, epochs=1, validation=0, strategy="ddp", progress=False)
    bad = (rows()[0], torch.full((45, 1), 1e300, dtype=torch.float64))
    with pytest.raises(FloatingPointError, match="the loss is"):
        train(model, bad, strategy="ddp", standardize=False)


@pytest.mark.slow
def test_noise_resumption_and_what_does_not_fit(tmp_path: Path) -> None:
    in_two_processes(_more, tmp_path, str(tmp_path))


SCRIPT = """
import os, torch
from torch import nn
from workbench import fit, vote
x = torch.linspace(-1, 1, 40)[:, None]
model = vote.Wrapper(2)(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
for _ in range(2):
    history = fit(model, (x, x**2), epochs=2, strategy="ddp", progress=False)
total = sum(float(p.detach().double().sum()) for p in model.parameters())
open(f"rank{os.environ['RANK']}", "w").write(f"{len(history.records)} {total!r}")
"""


@pytest.mark.slow
def test_torchrun_starts_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert told[0].startswith("2 ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "ddp"}, r"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set\); start the script by torchrun"),
        ({"strategy": "ddp", "folds": 2}, "with folds all voters train at once in one process"),
        ({"strategy": "fsdp"}, 'strategy must be None, "eager" or "ddp", not \'fsdp\''),
    ],
)
def test_without_a_group_it_is_said_what_to_do(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    model = vote.Wrapper(4)(nn.Linear(1, 1))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        fit(model, rows(), epochs=1, progress=False, **arguments)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
