"""`save_pretrained` folders of calibrated and of abstaining transformers models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench
from workbench import vote
from workbench.calibration import SplitConformal, calibrate, selective
from workbench.outputs import Logits

transformers = pytest.importorskip("transformers")
SIZE = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
IDS, LABELS = torch.randint(30, (60, 5), generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
NEW = torch.randint(30, (7, 5), generator=torch.Generator().manual_seed(1))


def plain(seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZE, num_labels=3)).eval()


def wrapped(**options: Any) -> Any:
    return vote.Wrapper(3, output={"logits": Logits()}, **options)(plain()).eval()


def first(x: Tensor) -> Tensor:
    return (x[:, 0] > 15).long()


MADE: dict[str, Callable[[], Any]] = {
    "temperature": lambda: calibrate(wrapped(), (IDS, LABELS), "temperature"),
    "sets": lambda: calibrate(wrapped(), (IDS, LABELS), "conformal"),
    "abstains": lambda: selective(calibrate(wrapped(), (IDS, LABELS)), (IDS, LABELS)).predictor(coverage=0.5),
    "rank one": lambda: calibrate(wrapped(share="rank1"), (IDS, LABELS), "temperature"),
    "compiled": lambda: calibrate(torch.compile(wrapped(), backend="eager"), (IDS, LABELS), "temperature"),
}


def answers(model: Any) -> list[Tensor]:
    with torch.no_grad():
        if type(model).__name__ == "SelectivePredictor":
            y, kept, risk = model(NEW)
            return [y.logits, kept, risk]
        y, risk = model(NEW, return_risk=True)
        outputs = [y.logits, *(getattr(risk[name], "logits", risk[name]) for name in risk)]
        return [*outputs, model.predict_set(NEW, coverage=0.8)] if isinstance(model, SplitConformal) else outputs


def same(one: Any, other: Any) -> bool:
    assert type(one) is type(other)
    return all(torch.equal(a, b) for a, b in zip(answers(one), answers(other), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_what_was_saved_comes_back_to_the_last_bit(name: str, tmp_path: Path) -> None:
    calibrated = MADE[name]()
    calibrated.save_pretrained(tmp_path)
    again = workbench.from_pretrained(tmp_path)
    assert not again.training
    assert same(again, calibrated)
    assert same(workbench.from_pretrained(tmp_path, plain(5)), calibrated)
    card = (tmp_path / "README.md").read_text()
    for module in (calibrated, *([calibrated.wrapped] if name == "abstains" else [])):
        assert f"`{type(module).__name__}(" in card
    assert ("kept, risk = model(" in card) == (name == "abstains")
    assert "none in this folder" not in card


@pytest.mark.slow
def test_a_fresh_process_says_the_same(tmp_path: Path) -> None:
    calibrated = MADE["abstains"]()
    calibrated.save_pretrained(tmp_path / "model")
    torch.save(NEW, tmp_path / "new.pt")
    program = (
        "import sys, torch, workbench\n"
        "model = workbench.from_pretrained(sys.argv[1] + '/model')\n"
        "with torch.no_grad(): y, kept, risk = model(torch.load(sys.argv[1] + '/new.pt'))\n"
        "torch.save([y.logits, kept, risk], sys.argv[1] + '/said.pt')"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=300)
    said = torch.load(tmp_path / "said.pt")
    assert all(torch.equal(a, b) for a, b in zip(said, answers(calibrated), strict=True))


def test_the_model_alone_replaces_what_was_calibrated(tmp_path: Path) -> None:
    calibrated = MADE["temperature"]()
    calibrated.save_pretrained(tmp_path)
    calibrated.wrapped.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*calibration*"))
    assert "none in this folder" in (tmp_path / "README.md").read_text()
    assert isinstance(workbench.from_pretrained(tmp_path), transformers.BertForSequenceClassification)


@pytest.mark.parametrize("name", ["temperature", "rank one"])
def test_a_calibration_of_other_weights_is_refused(name: str, tmp_path: Path) -> None:
    calibrated = MADE[name]()
    calibrated.save_pretrained(tmp_path)
    kept = (tmp_path / "workbench_calibration.safetensors").read_bytes()
    with torch.no_grad():
        for parameter in calibrated.wrapped.parameters():
            parameter.mul_(1.5)
    calibrated.wrapped.save_pretrained(tmp_path)
    (tmp_path / "workbench_calibration.safetensors").write_bytes(kept)
    with pytest.raises(ValueError, match="belongs to other weights"):
        workbench.from_pretrained(tmp_path)
    damaged = bytearray(kept)
    damaged[-3] ^= 1
    (tmp_path / "workbench_calibration.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged"):
        workbench.from_pretrained(tmp_path)


def test_a_refused_save_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    calibrated = MADE["temperature"]()
    calibrated.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="which the plain class would read in place of this wrapped"):
        wrapped(share="rank1").save_pretrained(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert same(workbench.from_pretrained(tmp_path), calibrated)


def test_functions_must_be_given_again(tmp_path: Path) -> None:
    calibrated = calibrate(wrapped(), (IDS, LABELS), "conformal", groups=first)
    calibrated.save_pretrained(tmp_path)
    assert "groups=..." in (tmp_path / "README.md").read_text()
    with pytest.raises(
        ValueError, match=r"with groups=, functions.* from_pretrained\(folder, SplitConformal\(wrapper\(model\)"
    ):
        workbench.from_pretrained(tmp_path)
    alike = SplitConformal(vote.Wrapper(3, output={"logits": Logits()})(plain(5)), groups=first)
    assert same(workbench.from_pretrained(tmp_path, alike), calibrated)
    (tmp_path / "workbench_calibration.safetensors").unlink()
    with pytest.raises(ValueError, match="holds a wrapped model, and this is a SplitConformal"):
        workbench.from_pretrained(tmp_path, alike)


def test_other_models_are_saved_to_files(tmp_path: Path) -> None:
    model = vote.Wrapper(3, output="logits")(nn.Linear(5, 3))
    with pytest.raises(TypeError, match=r"workbench\.save\(calibrated, path\)"):
        calibrate(model, (IDS.float(), LABELS), "temperature").save_pretrained(tmp_path)
