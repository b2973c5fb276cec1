"""Models that predict where an answer starts and ends: two scores and two labels per row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from workbench import calibrate, fit, neo, sample, sculpt, selective, top_uncertain, vote
from workbench.outputs import Logits

transformers = pytest.importorskip("transformers")
from helpers.labelled_models import ENCODERS  # noqa: E402  # it needs transformers

OUTPUT = {"start_logits": Logits(), "end_logits": Logits()}
IDS = torch.randint(3, 30, (12, 7), generator=torch.Generator().manual_seed(0))
START, END = torch.arange(12) % 4, torch.arange(12) % 4 + torch.arange(12) % 3
PLACES = {"start_positions": START, "end_positions": END}
PAIR = ({"input_ids": IDS}, {"start_logits": START, "end_logits": END})
every_encoder = pytest.mark.parametrize(
    "encoder", [pytest.param(name, marks=[] if name == "bert" else [pytest.mark.slow]) for name in ENCODERS]
)


class Rows(Dataset):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[i], "start_positions": START[i], "end_positions": END[i]}


def build(encoder: str = "bert") -> Any:
    prefix, (config, options) = ENCODERS[encoder]
    options = {**options, "num_labels": 2, "qa_dropout": 0.0}
    model = getattr(transformers, f"{prefix}ForQuestionAnswering")(getattr(transformers, config)(**options))
    with torch.no_grad():  # untrained, all scores are next to equal
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    return model.eval()


def entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.log()).sum(-1)


@every_encoder
def test_each_score_has_its_prediction_and_risks(encoder: str) -> None:
    wrapped: Any = vote.Wrapper(3, output=OUTPUT)(build(encoder)).eval()
    with torch.no_grad():
        y, risk = wrapped(IDS, return_risk=True)
        plain = [voter(IDS) for voter in wrapped.voters()]
    for name in OUTPUT:
        probs = torch.stack([one[name].softmax(-1) for one in plain])
        total, aleatoric = entropy(probs.mean(0)), entropy(probs).mean(0)
        torch.testing.assert_close(y[name].softmax(-1), probs.mean(0))
        for kind, expected in (("total", total), ("aleatoric", aleatoric), ("epistemic", total - aleatoric)):
            torch.testing.assert_close(risk[kind][name], expected, rtol=1e-4, atol=1e-5)


@every_encoder
def test_fit_on_pairs_trains_each_voter_by_the_sum_of_both_losses(encoder: str) -> None:
    wrapped: Any = vote.Wrapper(2, output=OUTPUT)(build(encoder))
    voters = [copy.deepcopy(voter).train() for voter in wrapped.voters()]
    rows = [
        ({"input_ids": x["input_ids"]}, {name: x[name.replace("logits", "positions")] for name in OUTPUT})
        for x in Rows()
    ]  # type: ignore[attr-defined]
    loader = DataLoader(rows, batch_size=12)  # type: ignore[arg-type]
    options: dict[str, Any] = {"epochs": 3, "validation": 0, "standardize": False, "progress": False}
    fit(wrapped, loader, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options)
    for trained, voter in zip(wrapped.voters(), voters, strict=True):
        optimizer = torch.optim.SGD(voter.parameters(), lr=0.05)  # of half of the mean over two voters
        for _ in range(3):
            optimizer.zero_grad()
            (2 * voter(IDS, **PLACES).loss).backward()  # which is the mean of both
            optimizer.step()
        torch.testing.assert_close(dict(trained.state_dict()), dict(voter.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrapper", [sculpt.Wrapper(n_layers=1, output=OUTPUT), sample.Wrapper(2, output=OUTPUT)])
def test_fit_on_pairs_under_other_wrappers(wrapper: Any) -> None:
    wrapped: Any = wrapper(build())
    start = copy.deepcopy(wrapped.state_dict())
    history = fit(wrapped, PAIR, epochs=8, lr=0.01, validation=0, progress=False)
    assert history.records[-1][1] < history.records[0][1]
    assert all(
        not torch.equal(value, start[name]) for name, value in wrapped.state_dict().items() if "qa_outputs" in name
    )


FORMS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"input_ids": IDS, **PLACES},
    "rows": lambda: [Rows()[i] for i in range(12)],
    "dataset": Rows,
    "loader": lambda: DataLoader(Rows(), batch_size=4),
}
TAKES: dict[str, Callable[[Any, Any], Any]] = {
    "fit": lambda wrapped, data: fit(wrapped, data, epochs=1, validation=0, progress=False),
    "calibrate": lambda wrapped, data: calibrate(wrapped, data, "temperature"),
    "selective": selective,
    "top_uncertain": lambda wrapped, data: top_uncertain(wrapped, data, 3),
}


@pytest.mark.parametrize("taken", TAKES)
@pytest.mark.parametrize("form", FORMS)
def test_two_labels_in_dicts_are_refused_by_name(form: str, taken: str) -> None:
    wrapped = vote.Wrapper(2, output=OUTPUT)(build())
    with pytest.raises(ValueError, match=r"targets in start_positions, end_positions.*Give pairs"):
        TAKES[taken](wrapped, FORMS[form]())


@pytest.mark.parametrize("form", FORMS)
def test_what_needs_no_labels_takes_them_all_the_same(form: str) -> None:
    wrapped, wanted = (neo.Wrapper(output=OUTPUT)(build()) for _ in range(2))
    wrapped.load_state_dict(copy.deepcopy(wanted.state_dict()))
    wrapped.fit(FORMS[form]())
    wanted.fit(IDS)
    torch.testing.assert_close(dict(wrapped.state_dict()), dict(wanted.state_dict()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:vote. the model gives a number")
@every_encoder
def test_a_stock_trainer_trains_each_voter_by_its_own_loss(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.trainer.is_datasets_available", lambda: False)
    wrapped: Any = vote.Wrapper(3, output=OUTPUT)(build(encoder))
    expected: dict[str, list[Tensor]] = {}
    for voter in wrapped.voters():
        voter.train()(IDS, **PLACES).loss.backward()
        for name, parameter in voter.named_parameters():
            if parameter.grad is not None:
                expected.setdefault(name, []).append(parameter.grad / 3)
    gradients: dict[str, Tensor] = {}

    class Look(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            for name, parameter in wrapped.named_parameters():
                if parameter.grad is not None:
                    gradients[name.removesuffix("@vote")] = parameter.grad.clone()

    def share(prediction: Any) -> dict[str, float]:
        assert [scores.shape for scores in prediction.predictions] == [(12, 7), (12, 7)]
        starts, ends = (torch.as_tensor(labels) for labels in prediction.label_ids)
        return {"labels": float(torch.equal(starts, START) and torch.equal(ends, END))}

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=12,
        max_steps=1,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model=wrapped,
        args=arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        compute_metrics=share,
        callbacks=[Look()],
    )
    trainer.train()
    assert gradients.keys() >= expected.keys()
    for name, gradient in expected.items():
        plain = torch.stack(gradient)
        torch.testing.assert_close(gradients[name].reshape(plain.shape), plain, rtol=1e-4, atol=1e-6)
    metrics = trainer.evaluate()
    assert metrics["eval_labels"] == 1
    with torch.no_grad():
        losses = [voter.eval()(IDS, **PLACES).loss for voter in wrapped.voters()]
        assert wrapped.eval()(IDS, **PLACES).loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
