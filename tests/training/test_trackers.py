"""What fit logs to a tracker equals its history, read back by the tracker's own reader."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.logged_trainings import made, quiet, rows
from helpers.tracker_readers import PACKAGES, RecordingTracker, active_run, offline, read
from helpers.two_processes import in_two_processes
from torch import nn

from workbench import compose, sculpt, vote
from workbench.errors import WorkbenchWarning
from workbench.trackers.tensorboard import TensorBoard
from workbench.training import History, Progress
from workbench.training import checkpoint as checkpoint_module


def curve(history: History, column: str) -> list[tuple[int, float]]:
    return list(zip(history.frame["epoch"], history.frame[column], strict=True))


def same(logged: list[tuple[int, float]], history: History, column: str, first: int = 1) -> None:
    """TensorBoard keeps single precision."""
    wanted = curve(history, column)[first - 1 :]
    assert [step for step, _ in logged] == [step for step, _ in wanted]
    assert [value for _, value in logged] == pytest.approx([value for _, value in wanted], rel=1e-6)


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with offline(request.param, tmp_path):
        yield request.param


# ---- what is logged
def test_a_tracker_is_told_what_the_history_says_in_order() -> None:
    tracker, wrapped = RecordingTracker(), made(compose(vote.Wrapper(2), sculpt.Wrapper()))
    history = quiet(wrapped, rows(), epochs=3, lr=0.01, seed=7, log_to=tracker)
    begin, *logged, last, end = tracker.calls
    assert begin[:2] == ("begin", "Sequential[vote(n_voters=2, use_bias=True), sculpt(distribution=Normal)]")
    assert begin[3:] == ("", None)
    settings = {
        "epochs": 3,
        "batch_size": 20,
        "seed": 7,
        "lr": 0.01,
        "weight_decay": 0.0,
        "optimizer": "AdamW",
        "device": "cpu",
    }
    assert settings.items() <= begin[2].items()
    assert not [name for name, value in begin[2].items() if "checkpoint" in name or len(str(value)) > 80]
    frame = history.frame
    assert [call[2] for call in logged] == [1, 2, 3]
    for name in ("loss", "validation_loss", "lr"):
        assert [call[1][name] for call in logged] == list(frame[name])
    best = frame.loc[frame["validation_loss"].idxmin()]
    assert last[1] == {
        "best_epoch": best["epoch"],
        "best_loss": best["loss"],
        "best_validation_loss": best["validation_loss"],
        "seconds": pytest.approx(frame["seconds"].sum()),
    }
    assert last[2] is None
    assert end == ("end", "finished")


def test_epochs_are_logged_as_they_come_and_the_callback_is_called() -> None:
    tracker, seen = RecordingTracker(), []

    def look(progress: Progress) -> None:
        seen.append((progress.step, progress.epoch_ended, len(tracker.calls)))

    quiet(made(), rows(), epochs=2, log_to=tracker, callback=look)  # 3 steps in each epoch
    assert seen == [(1, 0, 1), (2, 0, 1), (3, 0, 1), (3, 1, 2), (4, 0, 2), (5, 0, 2), (6, 0, 2), (6, 1, 3)]


def test_what_is_not_known_is_not_logged() -> None:
    tracker, folds = RecordingTracker(), RecordingTracker()
    quiet(made(), rows(), epochs=1, validation=0, optimizer=torch.optim.SGD, log_to=tracker)
    assert tracker.calls[1][1].keys() == {"loss", "lr"}
    assert "lr" not in tracker.calls[0][2]  # which an optimizer of one's own does not ask for
    assert "best_validation_loss" not in tracker.calls[2][1]
    history = quiet(made(vote.Wrapper(2)), rows(), epochs=4, folds=2, log_to=folds)
    assert folds.calls[0][2]["folds"] == 2
    assert [call[1]["lr"] for call in folds.calls[1:5]] == list(history.frame["lr"])
    assert [call[1]["loss"] for call in folds.calls[1:5]] == list(history.frame["loss"])
    assert history.out_of_fold is not None
    nll = -history.out_of_fold.decisions.log_prob.double().mean()
    assert folds.calls[-2][1]["out_of_fold_nll"] == pytest.approx(float(nll))


def test_data_are_called_by_their_name() -> None:
    tracker = RecordingTracker()
    quiet(made_for_cubic(), "cubic", epochs=1, log_to=tracker)
    assert tracker.calls[0][2]["data"] == "cubic"


def made_for_cubic() -> Any:
    return compose()(nn.Linear(1, 1))


def test_each_tracker_shows_the_history(package: str, tmp_path: Path) -> None:
    history = quiet(made(), rows(), epochs=4, lr=0.02, log_to=package)
    [run] = read(package, tmp_path)
    for name in ("loss", "validation_loss", "lr"):
        same(run.curves[name], history, name)
    assert run.status == "finished"
    assert run.state in ("FINISHED", "")
    wanted = {"epochs": "4", "batch_size": "20", "seed": "0", "lr": "0.02", "wrapped": "Sequential[]"}
    assert wanted.items() <= run.settings.items()
    assert run.summary["best_epoch"] == history.best_epoch
    assert run.summary["best_loss"] == pytest.approx(history.records[history.best_epoch - 1][1], rel=1e-6)
    assert active_run(package) is None


# ---- how it ends
def test_ctrl_c_ends_the_run(package: str, tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.epoch == 3:
            raise KeyboardInterrupt

    with pytest.warns(WorkbenchWarning, match="interrupted after 2 of 9"):
        history = quiet(made(), rows(), epochs=9, callback=interrupt, log_to=package)
    [run] = read(package, tmp_path)
    assert run.status == "interrupted"
    assert run.state in ("KILLED", "")
    same(run.curves["loss"], history, "loss")
    assert active_run(package) is None


def test_an_error_ends_the_run(package: str, tmp_path: Path) -> None:
    def fail(progress: Progress) -> None:
        if progress.epoch == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet(made(), rows(), epochs=9, callback=fail, log_to=package)
    [run] = read(package, tmp_path)
    assert run.status == "failed"
    assert run.state in ("FAILED", "")
    assert [step for step, _ in run.curves["loss"]] == [1]
    assert active_run(package) is None


def test_what_is_refused_leaves_no_run() -> None:
    tracker = RecordingTracker()
    with pytest.raises(ValueError, match="epochs"):
        quiet(made(), rows(), epochs=0, log_to=tracker)
    with pytest.raises(ValueError, match="holds NaN"):
        quiet(made(), (rows()[0] * torch.nan, rows()[1]), epochs=1, log_to=tracker)
    assert tracker.calls == []


# ---- going on
def broken_off(path: Path, **options: Any) -> None:
    def stop(progress: Progress) -> bool:
        return progress.epoch_ended and progress.epoch == 3

    quiet(made(), rows(), epochs=6, checkpoint=path, callback=stop, **options)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written after each epoch."""
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_resumed_training_goes_on_in_its_run(package: str, tmp_path: Path) -> None:
    broken_off(tmp_path / "state", log_to=package)
    [run] = read(package, tmp_path)
    assert (run.status, len(run.curves["loss"])) == ("interrupted", 3)
    history = quiet(made(), rows(), epochs=6, checkpoint=tmp_path / "state", log_to=package)
    assert len(history.records) == 6
    [run] = read(package, tmp_path)
    assert run.status == "finished"
    for name in ("loss", "validation_loss", "lr"):
        same(run.curves[name], history, name)


def test_what_a_resumed_run_logs_at_once_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard counts the files of a process, and reads number 10 before number 9 of the same second."""
    with offline("tensorboard", tmp_path):
        counter = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        monkeypatch.setattr(counter, "_global_uid", counter.AtomicCounter(9))
        tracker, run = TensorBoard(), None
        for steps in ([1, 2, 3], [4, 5, 6]):
            run = tracker.begin("model", {"epochs": 6}, resume=run)
            for step in steps:
                tracker.log({"loss": 0.5}, step)
            tracker.end("finished")
        [logged] = read("tensorboard", tmp_path)
        assert [step for step, _ in logged.curves["loss"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("at_once")
def test_one_of_a_run_that_is_gone_goes_on_in_steps(package: str, tmp_path: Path) -> None:
    broken_off(tmp_path / "state")  # as it was not logged, there is none
    history = quiet(made(), rows(), epochs=6, checkpoint=tmp_path / "state", log_to=package)
    [run] = read(package, tmp_path)
    same(run.curves["loss"], history, "loss", first=4)


@pytest.mark.usefixtures("at_once")
def test_a_tracker_gets_back_what_it_returned(tmp_path: Path) -> None:
    first, second, other = RecordingTracker(), RecordingTracker(), type("Other", (RecordingTracker,), {})()
    broken_off(tmp_path / "state", log_to=first)
    saved = (tmp_path / "state").read_bytes()
    quiet(made(), rows(), epochs=6, checkpoint=tmp_path / "state", log_to=second)
    assert second.calls[0][4] == "run 1"
    assert second.epochs() == [4, 5, 6]
    (tmp_path / "state").write_bytes(saved)
    quiet(made(), rows(), epochs=6, checkpoint=tmp_path / "state", log_to=other)
    assert other.calls[0][4] is None  # it is of another kind
    assert other.epochs() == [4, 5, 6]


@pytest.mark.usefixtures("at_once")
def test_cross_fitting_goes_on_in_its_run(tmp_path: Path) -> None:
    first, second = RecordingTracker(), RecordingTracker()
    options: dict[str, Any] = {"folds": 2, "epochs": 6, "checkpoint": tmp_path / "state"}
    quiet(made(vote.Wrapper(2)), rows(), callback=lambda p: p.epoch_ended and p.epoch == 2, log_to=first, **options)
    quiet(made(vote.Wrapper(2)), rows(), log_to=second, **options)
    assert (first.epochs(), second.epochs(), second.calls[0][4]) == ([1, 2], [3, 4, 5, 6], "run 1")


def _in_each_process(rank: int, folder: str) -> None:
    vars(checkpoint_module)["WRITE_INTERVAL"] = 0.0  # of this process, which ends with the test
    first, second = RecordingTracker(), RecordingTracker()
    broken_off(Path(folder) / "state", log_to=first, strategy="ddp")
    history = quiet(made(), rows(), epochs=6, checkpoint=Path(folder) / "state", log_to=second, strategy="ddp")
    if rank == 0:
        assert (first.epochs(), first.calls[-1]) == ([1, 2, 3], ("end", "interrupted"))
        assert (second.epochs(), second.calls[-1]) == ([4, 5, 6], ("end", "finished"))
        assert second.calls[0][4] == "run 1"
        assert [call[1]["loss"] for call in second.calls[1:4]] == list(history.frame["loss"])[3:]
    else:
        assert first.calls == second.calls == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_of_two_processes_the_first_logs(tmp_path: Path) -> None:
    in_two_processes(_in_each_process, tmp_path, str(tmp_path))


@pytest.mark.usefixtures("at_once")
def test_a_deleted_mlflow_run_is_not_gone_on_with(tmp_path: Path) -> None:
    with offline("mlflow", tmp_path):
        import mlflow

        broken_off(tmp_path / "state", log_to="mlflow")
        [old] = read("mlflow", tmp_path)
        mlflow.delete_run(old.id)
        quiet(made(), rows(), epochs=6, checkpoint=tmp_path / "state", log_to="mlflow")
        [new] = read("mlflow", tmp_path)
        assert new.id != old.id
        assert [step for step, _ in new.curves["loss"]] == [4, 5, 6]


# ---- the user's own runs
def test_the_active_mlflow_run_is_logged_to_and_stays_open(tmp_path: Path) -> None:
    with offline("mlflow", tmp_path):
        import mlflow

        with mlflow.start_run(run_name="mine") as mine:
            mlflow.log_param("lr", "my own")
            with pytest.warns(WorkbenchWarning, match="other values of lr already") as warned:
                history = quiet(made(), rows(), epochs=2, log_to="mlflow")
            assert len(warned) == 1
            assert mlflow.active_run().info.run_id == mine.info.run_id
            assert mlflow.get_run(mine.info.run_id).info.status == "RUNNING"
            mlflow.log_metric("after", 1.0)
        [run] = read("mlflow", tmp_path)
        assert run.id == mine.info.run_id
        assert run.settings["lr"] == "my own"
        assert run.settings["epochs"] == "2"
        same(run.curves["loss"], history, "loss")


def test_the_active_wandb_run_is_logged_to_and_stays_open(tmp_path: Path) -> None:
    with offline("wandb", tmp_path):
        import wandb

        mine = wandb.init(config={"lr": "my own"})
        for _ in range(30):  # its steps are further on than our epochs
            mine.log({"theirs": 0.0, "step": -1})
        with pytest.warns(WorkbenchWarning, match="other values of lr already"):
            history = quiet(made(), rows(), epochs=2, log_to="wandb")
        assert wandb.run is mine
        mine.log({"after": 1.0, "step": 0})
        mine.finish()
        [run] = read("wandb", tmp_path)
        assert run.settings["lr"] == "my own"
        assert run.settings["epochs"] == "2"
        same(run.curves["loss"], history, "loss")
        assert run.curves["after"] == [(0, 1.0)]


@pytest.mark.usefixtures("at_once")
def test_a_run_of_the_users_is_not_opened_again(tmp_path: Path) -> None:
    with offline("mlflow", tmp_path):
        import mlflow

        with mlflow.start_run() as mine:
            broken_off(tmp_path / "state", log_to="mlflow")
        quiet(made(), rows(), epochs=6, checkpoint=tmp_path / "state", log_to="mlflow")
        counts = {run.id: len(run.curves["loss"]) for run in read("mlflow", tmp_path)}
        assert counts.pop(mine.info.run_id) == 3
        assert list(counts.values()) == [3]


def test_settings_with_line_breaks_stay_in_one_row_of_tensorboards_table(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(tmp_path)
    folder = tracker.begin("run", {"text": "a\nb|c", "lr": 0.1})
    tracker.end("finished")
    events = EventAccumulator(str(folder)).Reload()
    table = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert table.splitlines()[2:] == ["|text|a b&#124;c|", "|lr|0.1|"]
