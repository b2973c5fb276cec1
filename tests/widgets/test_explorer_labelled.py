"""Explorers of dicts with `labels`: rows and numbers equal those of targets given explicitly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from workbench import calibrate, vote
from workbench.widgets import Explorer

pytest.importorskip("transformers")
from helpers.labelled_models import LABELLED  # it needs transformers


def rows(name: str, n: int = 40) -> tuple[Any, dict[str, torch.Tensor]]:
    case = LABELLED[name]
    batch = case.batch(n)
    if "attention_mask" in batch:
        batch["input_ids"], batch["attention_mask"] = (
            batch["input_ids"].clamp_min(3),
            torch.ones_like(batch["input_ids"]),
        )
    return vote.Wrapper(3, output=case.output)(case.build()).eval(), batch


@pytest.mark.parametrize("name", ["bert classes", "bert value", "bert tokens", "gpt2", "vit"])
@pytest.mark.parametrize("form", ["dict", "rows", "batches"])
def test_errors_are_those_of_the_targets_that_one_writes(name: str, form: str) -> None:
    wrapped, batch = rows(name)
    each = [{key: value[i] for key, value in batch.items()} for i in range(40)]
    forms = {"dict": batch, "rows": each, "batches": [default_collate(each[:20]), default_collate(each[20:])]}
    explorer = Explorer(wrapped, forms[form], by="error")
    x = explorer.data.test.x
    main = next(iter(batch))
    places = [next(i for i in range(40) if torch.equal(batch[main][i].to(row), row)) for row in x]
    labels = batch["labels"][places]
    with torch.no_grad():
        scores = wrapped(batch[main][places]).logits
    if name == "gpt2":
        scores, labels = scores[:, :-1], labels[:, 1:]
    if name == "bert value":
        errors = (scores[:, 0] - labels).abs()
    else:
        lost = F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="none").reshape(labels.shape)
        errors = lost.reshape(len(lost), -1).sum(1) / (labels != -100).reshape(len(lost), -1).sum(1)
    assert explorer.ranked.tolist() == explorer.rows[errors.argsort(descending=True, stable=True)].tolist()


def test_padding_is_refused_and_a_calibrated_model_is_taken() -> None:
    wrapped, batch = rows("bert classes")
    calibrated = calibrate(wrapped, batch, "temperature")
    assert len(Explorer(calibrated, batch).rows) == 8
    batch["attention_mask"][3, -1] = 0
    with pytest.raises(ValueError, match=r"depend on attention_mask as well: .* without padding"):
        Explorer(wrapped, batch)
