"""Several lengths of a cross-fitted training: the kept one equals that training alone, chosen by the documented rule."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fold_models import plane, quiet, wrapped
from helpers.tracker_readers import RecordingTracker
from torch import Tensor

from workbench.errors import WorkbenchWarning
from workbench.training import History, Progress
from workbench.training import checkpoint as checkpoint_module

NOISE = (
    torch.randn(60, 2, generator=torch.Generator().manual_seed(1)),
    torch.randn(60, 1, generator=torch.Generator().manual_seed(2)),
)


def trained(rows: tuple[Tensor, Tensor], epochs: Any, **options: Any) -> tuple[Any, History]:
    model = wrapped(6)
    return model, quiet(model, rows, folds=3, epochs=epochs, **options)


def equal(model: Any, other: Any) -> bool:
    state = other.state_dict()
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "lengths", "kept"), [(plane(), (2, 20), 20), (plane(), (2, 20, 60), 60), (NOISE, (3, 40, 80), 3)]
)
def test_the_longest_that_was_better_by_more_than_its_standard_error_is_kept(
    rows: tuple[Tensor, Tensor], lengths: tuple[int, ...], kept: int
) -> None:
    alone = {n: trained(rows, n) for n in lengths}
    expected = lengths[0]
    for shorter, longer in itertools.pairwise(lengths):
        both = [alone[n][1].out_of_fold.decisions.log_prob.flatten() for n in (longer, shorter)]
        gain = (both[0] - both[1]).numpy()
        if gain.mean() <= gain.std(ddof=1) / len(gain) ** 0.5:
            break
        expected = longer
    assert expected == kept
    model, history = trained(rows, lengths)
    assert equal(model, alone[kept][0])
    assert len(history.records) == kept
    assert not history.interrupted
    x = rows[0]
    (y, risk), (expected_y, expected_risk) = (one(x, return_risk=True) for one in (model, alone[kept][0]))
    assert torch.equal(y, expected_y)
    assert torch.equal(risk.total, expected_risk.total)


@pytest.mark.parametrize("how", ["stopped", "interrupted"])
def test_a_longer_training_that_ends_early_is_left_out(how: str) -> None:
    def end(progress: Progress) -> bool:
        if progress.epochs != 20 or progress.epoch < 5:
            return False
        if how == "interrupted":
            raise KeyboardInterrupt
        return True

    if how == "interrupted":
        with pytest.warns(WorkbenchWarning, match="while it tried 20 epochs; the model is that of 2 epochs") as told:
            model, history = trained(plane(), (2, 20), callback=end)
        assert told[0].filename == __file__
    else:
        model, history = trained(plane(), (2, 20), callback=end)
    assert history.interrupted
    assert len(history.records) == 2
    assert equal(model, trained(plane(), 2)[0])


@pytest.mark.slow
def test_it_goes_on_with_the_length_at_which_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "WRITE_INTERVAL", 0.0)
    epochs = []

    def interrupt(progress: Progress) -> None:
        if progress.epochs == 20 and progress.epoch == 5:
            raise KeyboardInterrupt

    def count(progress: Progress) -> None:
        if progress.epoch_ended:
            epochs.append((progress.epochs, progress.epoch))

    with pytest.warns(WorkbenchWarning, match="interrupted"):
        trained(plane(), (2, 20), checkpoint=tmp_path / "state", callback=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.2", "state.20"]
    resumed, history = trained(plane(), (2, 20), checkpoint=tmp_path / "state", callback=count)
    assert epochs == [(20, epoch) for epoch in range(epochs[0][1], 21)]
    assert 1 < epochs[0][1] < 20
    assert equal(resumed, trained(plane(), (2, 20))[0])
    assert len(history.records) == 20


def test_a_tracker_is_told_one_epoch_after_the_other() -> None:
    tracker = RecordingTracker()
    trained(plane(), (2, 4), log_to=tracker)
    begin, *logged, _, _ = tracker.calls
    assert begin[2]["epochs"] == [2, 4]
    assert [call[2] for call in logged] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": (2, 4), "folds": None}, "several lengths need folds="),
        ({"epochs": (4, 2)}, "the shortest first"),
        ({"epochs": (2, 2)}, "give each length once"),
        ({"epochs": ()}, "give each length once"),
        ({"epochs": (0, 2)}, "epochs must be a whole number of at least 1; found 0"),
    ],
)
def test_bad_lengths_are_refused_before_anything_is_changed(options: dict[str, Any], words: str) -> None:
    model = wrapped(6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        quiet(model, plane(), **{"folds": 3, **options})
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
