"""Decorated classes that load themselves (`Net.from_pretrained(folder)`), and `save_pretrained` of wrapped models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, is_wrapped, sample, sculpt, vote

MAKERS = {
    "vote": lambda: vote.Wrapper(3),
    "finetune": lambda: vote.Wrapper(3, finetune=True),
    "share": lambda: vote.Wrapper(3, share=1),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "sculpt": lambda: sculpt.Wrapper(n_layers=1),
    "sample": lambda: sample.Wrapper(3),
    "composed": lambda: compose(vote.Wrapper(3), sculpt.Wrapper(n_layers=1)),
}
every_kind = pytest.mark.parametrize("kind", MAKERS)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    @classmethod
    def from_pretrained(cls, path: Path, **kwargs: Any) -> Any:
        model = cls(**kwargs)
        model.load_state_dict(torch.load(path))
        return model


class OnMeta(Net):
    @classmethod
    def from_pretrained(cls, path: Path, **kwargs: Any) -> Any:
        with torch.device("meta"):
            model = cls(**kwargs)
        model.load_state_dict(torch.load(path), assign=True)
        return model


class ByName(Net):
    """Skips the names that it does not know."""

    @classmethod
    def from_pretrained(cls, path: Path, **kwargs: Any) -> Any:
        model = cls(**kwargs)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in torch.load(path).items():
                if name in parameters:
                    parameters[name].copy_(value)
        return model


class WithReport(Net):
    """What fits, and a report beside the model."""

    @classmethod
    def load(cls, path: Path, **kwargs: Any) -> Any:
        model = cls(**kwargs)
        state = model.state_dict()
        state.update({name: value for name, value in torch.load(path).items() if name in state})
        return model, model.load_state_dict(state)

    @classmethod
    def from_pretrained(cls, path: Path, **kwargs: Any) -> Any:
        return cls.load(path, **kwargs)[0]


def holds(voter: nn.Module, weights: dict[str, Tensor], kind: str) -> bool:
    present = dict(voter.named_parameters())
    # a rank-one voter scales the pretrained weights
    names = [name for name in weights if kind != "rank1" or name.endswith("bias")]
    return all(torch.equal(present[name], weights[name]) for name in names)


@every_kind
@pytest.mark.parametrize("cls", [Net, OnMeta, ByName, WithReport])
def test_what_a_classmethod_loads_is_what_every_voter_holds(cls: Any, kind: str, tmp_path: Path) -> None:
    plain = Net()
    torch.save(plain.state_dict(), tmp_path / "weights")
    decorated = MAKERS[kind]()(cls)
    model = decorated.from_pretrained(tmp_path / "weights")
    assert is_wrapped(model)
    assert isinstance(model, decorated)
    weights = dict(plain.named_parameters())
    assert all(holds(voter, weights, kind) for voter in model.voters())
    if kind == "rank1":
        assert torch.equal(model.a.weight, plain.a.weight)
    y, _ = model.eval()(torch.randn(5, 4), return_risk=True)
    assert y.shape == (5, 2)
    assert is_wrapped(decorated())  # built as ever


@every_kind
def test_a_classmethod_loads_the_state_of_a_wrapped_instance(kind: str, tmp_path: Path) -> None:
    decorated: Any = MAKERS[kind]()(Net)
    trained = decorated(width=6).eval()
    torch.save(trained.state_dict(), tmp_path / "weights")
    model = decorated.from_pretrained(tmp_path / "weights", width=6).eval()
    assert model.state_dict().keys() == trained.state_dict().keys()
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_subclass_of_a_decorated_class_may_load_by_super(tmp_path: Path) -> None:
    decorated: Any = vote.Wrapper(3)(Net)

    class Child(decorated):
        @classmethod
        def from_pretrained(cls, path: Path, **kwargs: Any) -> Any:
            return super().from_pretrained(path, **kwargs)

    plain = Net()
    torch.save(plain.state_dict(), tmp_path / "weights")
    model = Child.from_pretrained(tmp_path / "weights")
    assert isinstance(model, Child)
    assert all(holds(voter, dict(plain.named_parameters()), "vote") for voter in model.voters())


# ---- transformers --------------------------------------------------------------------------------------------------


@pytest.fixture
def bert(tmp_path: Path) -> tuple[type[nn.Module], Any, Path]:
    """A class, a model of it with weights of its own, and the folder where it lies."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=3,
        max_position_embeddings=12,
    )
    cls = transformers.BertForSequenceClassification
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "plain")
    return cls, model, tmp_path / "plain"


IDS = torch.arange(12).reshape(2, 6)


@every_kind
def test_a_decorated_class_of_transformers_holds_the_pretrained_weights(kind: str, bert: Any) -> None:
    cls, plain, folder = bert
    model = MAKERS[kind]()(cls).from_pretrained(folder).eval()
    weights = dict(plain.named_parameters())
    assert all(holds(voter, weights, kind) for voter in model.voters())
    assert model(IDS, return_risk=True)[0].logits.shape == (2, 3)
    half = MAKERS[kind]()(cls).from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "rank1"])
def test_a_saved_wrapped_model_is_read_by_the_plain_class_and_the_decorated_one(
    kind: str, bert: Any, tmp_path: Path
) -> None:
    cls, plain, _ = bert
    wrapped = MAKERS[kind]()(plain).eval()
    wrapped.save_pretrained(tmp_path / "saved")
    single = cls.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(single(IDS).logits, wrapped.unwrap()(IDS).logits)
    again = MAKERS[kind]()(cls).from_pretrained(tmp_path / "saved").eval()
    outputs = []
    for model in (wrapped, again):
        torch.manual_seed(1)
        y, risk = model(IDS, return_risk=True)
        outputs.append((y.logits, (risk if kind != "composed" else risk.total).logits))
    torch.testing.assert_close(*outputs)
    # as the Trainer goes on from a checkpoint
    from safetensors.torch import load_file

    resumed = MAKERS[kind]()(plain).eval()
    resumed.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"), strict=False)
    torch.manual_seed(1)
    torch.testing.assert_close(resumed(IDS, return_risk=True)[0].logits, outputs[0][0])


def test_other_settings_than_those_that_were_saved_are_told(bert: Any, tmp_path: Path) -> None:
    cls, plain, _ = bert
    vote.Wrapper(3)(plain).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="n_voters"):
        vote.Wrapper(5)(cls).from_pretrained(tmp_path / "saved")


def test_what_a_plain_class_could_not_read_is_not_saved(bert: Any, tmp_path: Path) -> None:
    cls, plain, _ = bert
    wrapped = vote.Wrapper(3, share="rank1")(plain)  # its shared weights are no voter's
    for state in (wrapped.state_dict(), None):  # the Trainer, which would read them
        with pytest.raises(TypeError, match=r"workbench\.save"):
            wrapped.save_pretrained(tmp_path / "saved", state_dict=state)
    assert not (tmp_path / "saved").exists()
    wrapped.save_pretrained(tmp_path / "saved")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        cls.from_pretrained(tmp_path / "saved")

    class Hub(Net):
        def save_pretrained(self, folder: Path) -> None:
            torch.save(self.state_dict(), folder)

    with pytest.raises(TypeError, match=r"unwrap\(\)\.save_pretrained"):
        vote.Wrapper(3)(Hub()).save_pretrained(tmp_path / "weights")
    vote.Wrapper(3)(Hub()).unwrap().save_pretrained(tmp_path / "weights")
    assert torch.load(tmp_path / "weights").keys() == Hub().state_dict().keys()
