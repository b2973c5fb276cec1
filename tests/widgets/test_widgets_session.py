"""Runs of a comparison: none is overwritten, deleted ones can be restored, and a session file brings all to another kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench.widgets import Comparison


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 3, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(60, 1, generator=generator)


def small():
    return nn.Linear(3, 1)


def made(**options):
    return Comparison(small, rows(), ["vote"], **{"epochs": 2, **options})


@pytest.mark.slow
def test_a_training_with_other_settings_overwrites_no_run():
    comparison = made().start(block=True)
    first = comparison.results
    comparison.controls.epochs.value = 1
    comparison.start(block=True)
    runs = comparison.runs
    assert runs.index.tolist() == [1, 2, 3, 4]
    assert runs.model.tolist() == ["plain", "vote"] * 2
    assert runs.epochs.tolist() == [2, 2, 1, 1]
    assert ["epochs 2, not 1" in why for why in runs.differs] == [True, True, False, False]
    assert runs.rmse.tolist()[:2] == first.rmse.tolist()
    shown = comparison.controls.metrics.value
    assert shown.count("plain #1") == 2  # the row, and the line below
    comparison.controls.epochs.value = 2  # as before: what was trained then counts again, and needs no training
    assert comparison.results.equals(first)
    assert comparison.start(block=True).runs.index.tolist() == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_same_settings_again_are_another_run_and_the_last_one_counts():
    comparison = made().start(block=True).start(block=True, again=True)
    assert comparison.runs.differs.tolist() == ["trained again since, with the same settings"] * 2 + ["", ""]
    assert comparison.outdated.empty
    assert comparison.results.index.tolist() == ["plain", "vote"]


@pytest.mark.slow
def test_deleted_runs_come_back():
    comparison = made().start(block=True)
    before = comparison.results
    comparison.delete(1, 2)
    assert comparison.runs.empty
    assert comparison.results.empty
    with pytest.raises(KeyError, match="no run 1"):
        comparison.delete(1)
    comparison.undo()
    assert comparison.results.equals(before)
    with pytest.raises(ValueError, match="no run was deleted"):
        comparison.undo()
    comparison.controls.pick_run.value = 2
    comparison.controls.delete.click()
    assert list(comparison.models) == ["plain"]
    comparison.controls.undo.click()
    assert list(comparison.models) == ["plain", "vote"]


@pytest.mark.slow
def test_a_session_is_opened_again(tmp_path):
    path = tmp_path / "moons.session"
    before = made(session=path)
    assert not path.exists()
    before.start(block=True)
    after = made(session=path)
    assert after.results.equals(before.results)
    assert after.runs.equals(before.runs)
    assert after.models == {}
    assert after.histories["vote"].records == before.histories["vote"].records
    after._repr_mimebundle_()
    panel = after.controls.rows["vote"].panel.value
    assert "vote(n_voters=3" in panel
    assert panel.count("<svg") == 2
    asked, read = (comparison._findings.trained["vote"].answers for comparison in (before, after))
    assert torch.equal(asked.y, read.y)
    assert torch.equal(asked.risk["total"], read.risk["total"])
    assert after.start(block=True).runs.index.tolist() == [1, 2]  # nothing is to be trained
    assert list(after.start(block=True, again=True).models) == ["plain", "vote"]
    assert made(session=path).runs.index.tolist() == [1, 2, 3, 4]
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".lock"] == ["moons.session"]


@pytest.mark.slow
def test_what_is_of_other_settings_or_weights_is_grey_when_it_is_opened(tmp_path):
    path = tmp_path / "session"
    made(session=path).start(block=True)
    other = made(session=path, epochs=3)
    assert other.results.empty
    assert other.outdated.differs.tolist() == ["epochs 2, not 3"] * 2
    model = small()
    nn.init.zeros_(model.weight)
    fixed = Comparison(model, rows(), ["vote"], epochs=2, session=path)
    assert "started at other weights" in fixed.outdated.differs["vote"]


@pytest.mark.slow
def test_two_kernels_lose_no_run_of_each_other(tmp_path):
    first, second = (made(session=tmp_path / "session") for _ in range(2))
    first.start(block=True)
    second.start(block=True)
    assert len(made(session=tmp_path / "session").runs) == 4
    first.delete(1)  # writes the file again
    assert len(made(session=tmp_path / "session").runs) == 3


@pytest.mark.slow
def test_what_one_kernel_deletes_another_does_not_write_back(tmp_path):
    first, second = (made(session=tmp_path / "session") for _ in range(2))
    first.start(block=True)
    second.start(block=True)  # trains its own, and takes up those of the first
    assert second.runs.index.tolist() == [1, 2, 3, 4]
    names = dict(zip([1, 2, 3, 4], second.runs.model, strict=True))
    first.delete(1)
    assert first.runs.index.tolist() == [2, 3, 4]  # the numbers of the others stay
    second.delete(4)  # it still had the first
    assert second.runs.index.tolist() == [2, 3]
    assert made(session=tmp_path / "session").runs.model.to_dict() == {2: names[2], 3: names[3]}
    first.undo()
    assert second.runs.index.tolist() == [2, 3]
    second.start(block=True, again=True)  # no number is given twice
    assert second.runs.index.tolist() == [1, 2, 3, 5, 6]
    assert made(session=tmp_path / "session").runs.index.tolist() == [1, 2, 3, 5, 6]


@pytest.mark.slow
def test_files_of_other_data_or_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "session"
    made(session=path).start(block=True)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"session: .*holds runs of your data \(digest .*give the data of these runs"):
        Comparison(small, rows(1), ["vote"], session=path)
    assert path.read_bytes() == content
    path.write_text("a note")
    with pytest.raises(ValueError, match="is no session file"):
        made(session=path)


@pytest.mark.slow
def test_every_row_says_its_split_and_seed_in_the_widget_and_in_what_is_saved():
    import re

    from workbench.widgets.comparison.saved import saved_page

    comparison = made(seed=3, split=1).start(block=True)
    comparison.controls.seed.value = 4
    comparison.start(block=True)
    for page in (comparison.controls.metrics.value, saved_page(comparison._findings)):
        heads = dict(re.findall(r'<th scope="row" title="([^"]*)">([^<]+)', page))
        tips = {name.strip(): tip for tip, name in heads.items()}
        assert set(tips) == {"plain", "vote", "plain #1", "vote #2"}
        assert "split 1, seed 4, trained 20" in tips["vote"]
        assert "split 1, seed 3, trained 20" in tips["vote #2"]
        assert "Differs from the current settings: seed 3, not 4" in tips["vote #2"]
        assert "vote #2 <small>split 1, seed 3</small>" in page  # without a pointer, too
    assert "#2 vote, split 1, seed 3, " in str(comparison.controls.pick_run.options)
    repeated = made(seeds=2).start(block=True)
    assert "split 0, seed 0; split 0, seed 1" in repeated.controls.metrics.value
