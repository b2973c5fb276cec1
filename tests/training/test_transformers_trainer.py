"""The Trainer of transformers, which gives the model its labels: a loss beside the logits has no rows that could be dealt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import WorkbenchWarning, neo, vote
from workbench.outputs import Logits

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:vote. the model gives a number")
def test_voters_that_stay_alike_are_told_and_the_remedy_works(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True, output="logits")(bert(0.0))
    with pytest.warns(WorkbenchWarning, match=r"stay alike.*wrapped\.loss.*compute_loss"):
        train(wrapped, tmp_path, transformers.Trainer)
    assert spread(wrapped) == 0

    train(wrapped, tmp_path, VotersTrainer)
    assert spread(wrapped) > 1e-5


class VotersTrainer(transformers.Trainer):
    """As docs/how_to/train.md has it."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        loss = model.loss(lambda output, y: F.cross_entropy(output.logits, y, reduction="sum"), inputs, labels)
        return loss / (num_items_in_batch or len(labels))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    rows, start, trained = Rows(8), bert(0.0), []
    for batch in (8, 4):
        torch.manual_seed(1)
        wrapped: Any = vote.Wrapper(3, finetune=True, output="logits")(copy.deepcopy(start))
        options = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=8 // batch,
            max_steps=1,
            max_grad_norm=0.0,
            learning_rate=0.1,
            optim="sgd",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = VotersTrainer(model=wrapped, args=options, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
        trained.append(dict(wrapped.named_parameters()))
    for name, parameter in trained[0].items():
        torch.testing.assert_close(parameter, trained[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dropout_lets_voters_differ(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(3, finetune=True)(bert(0.2))
    with pytest.warns(WorkbenchWarning, match=r"mean of the voters.*wrapped\.loss"):
        train(wrapped, tmp_path, transformers.Trainer)
    assert spread(wrapped) > 1e-6


def gpt() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=30, n_layer=1, n_head=2, n_embd=8, n_positions=16, **dropout)
    )


def scores(predictions: Any) -> dict[str, float]:
    assert len(predictions.predictions) == len(predictions.label_ids) == 16
    return {"count": float(len(predictions.predictions))}


MODES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "classes": (lambda: bert(0.0), "logits", lambda ids, labels: labels),
    "tokens": (gpt, {"logits": Logits(dim=-1)}, lambda ids, labels: torch.where(ids > 20, -100, ids)),
    "values": (lambda: bert(0.0), "values", lambda ids, labels: ids[:, :2].float() / 30),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:vote. the model gives a number")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options"),
    [*((mode, {}) for mode in MODES), ("tokens", {"bf16": True}), ("tokens", {"gradient_checkpointing": True})],
    ids=str,
)
def test_a_stock_trainer_gives_each_voter_its_own_gradient(mode: str, options: dict[str, bool], tmp_path: Path) -> None:
    make, output, labels = MODES[mode]
    rows: Any = Rows()
    rows.labels = labels(rows.ids, rows.labels)
    model: Any = make()
    if mode == "values":
        model.config.problem_type = "regression"
    wrapped: Any = vote.Wrapper(3, output=output)(model)

    def first_gradients(trained: Any, steps: int) -> tuple[Any, dict[str, Tensor]]:
        gradients: dict[str, Tensor] = {}

        class FirstStep(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                for name, parameter in trained.named_parameters() if not gradients else ():
                    if parameter.grad is not None:
                        gradients[name.removesuffix("@vote")] = parameter.grad.clone()

        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=16,
            max_grad_norm=0.0,
            max_steps=steps,
            save_steps=steps,
            save_strategy="steps" if steps > 1 else "no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **options,
        )
        trainer = transformers.Trainer(
            model=trained,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows,
            compute_metrics=scores,
            callbacks=[FirstStep()],
        )
        trainer.train()
        return trainer, gradients

    expected = [first_gradients(voter.train(), 1)[1] for voter in wrapped.voters()]
    trainer, gradients = first_gradients(wrapped, 2)
    assert gradients.keys() >= expected[0].keys()
    tolerance = {"rtol": 0.05, "atol": 5e-3} if "bf16" in options else {"rtol": 1e-4, "atol": 1e-6}
    for name in expected[0]:
        plain = torch.stack([each[name] for each in expected]) / 3
        torch.testing.assert_close(gradients[name].reshape(plain.shape), plain, **tolerance)
    assert trainer.evaluate()["eval_count"] == 16
    if not options:
        trainer.args.max_steps = 3
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert trainer.state.global_step == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_smoothed_labels_are_shifted_for_a_wrapped_decoder(tmp_path: Path) -> None:
    rows: Any = Rows()
    rows.labels = rows.ids

    def loss(trained: Any) -> float:
        arguments = transformers.TrainingArguments(
            str(tmp_path), label_smoothing_factor=0.1, max_steps=1, save_strategy="no", report_to=[], use_cpu=True
        )
        return transformers.Trainer(model=trained, args=arguments, train_dataset=rows).train().training_loss

    torch.manual_seed(0)
    plain = gpt()
    with torch.no_grad():
        plain.transformer.wte.weight.mul_(50)
    wrapped: Any = neo.Wrapper(output={"logits": Logits(dim=-1)})(copy.deepcopy(plain))
    assert wrapped._get_name() == "GPT2LMHeadModel"
    assert repr(wrapped).startswith("GPT2LMHeadModel[neo")
    assert loss(wrapped) == pytest.approx(loss(plain), rel=1e-4)
