"""The Trainer of transformers, which gives the model its labels: a loss beside the logits has no rows that could be dealt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import WorkbenchWarning, vote

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("seeded")


class Rows(torch.utils.data.Dataset):
    def __init__(self, n: int = 16) -> None:
        self.ids, self.labels = torch.randint(3, 30, (n, 5)), torch.randint(2, (n,))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def bert(dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


@pytest.fixture(autouse=True)
def no_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder datasets/ of a checkout is taken for the package of that name."""
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)


def train(wrapped: Any, folder: Path, cls: Any) -> None:
    options = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=3, report_to=[], disable_tqdm=True, use_cpu=True
    )
    cls(model=wrapped, args=options, train_dataset=Rows()).train()


def spread(wrapped: Any) -> float:
    ids = Rows().ids
    with torch.no_grad():
        logits = torch.stack([voter.eval()(ids).logits for voter in wrapped.voters()])
    return float(logits.std(0).min())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_voters_that_stay_alike_are_told_and_the_remedy_works(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True)(bert(0.0))
    with pytest.warns(WorkbenchWarning, match=r"stay alike.*wrapped\.loss.*compute_loss"):
        train(wrapped, tmp_path, transformers.Trainer)
    assert spread(wrapped) == 0

    class Weighed(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Tensor], **kwargs: Any) -> Tensor:
            labels = inputs.pop("labels")
            return model.loss(lambda output, y: F.cross_entropy(output.logits, y), inputs, labels)

    train(wrapped, tmp_path, Weighed)
    assert spread(wrapped) > 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dropout_lets_voters_differ(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True)(bert(0.2))
    with pytest.warns(WorkbenchWarning, match=r"mean of the voters.*wrapped\.loss"):
        train(wrapped, tmp_path, transformers.Trainer)
    assert spread(wrapped) > 1e-6
