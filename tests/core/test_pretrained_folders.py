"""Folders written by `save_pretrained` of wrapped transformers and peft models, read by `workbench.from_pretrained`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench
from workbench import compose, neo, sample, sculpt, vote
from workbench.outputs import Logits

transformers = pytest.importorskip("transformers")
IDS = torch.arange(12).reshape(2, 6)
SMALL = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "num_labels": 3,
    "max_position_embeddings": 12,
}
CLASSES = {"logits": Logits()}
WRAPPERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3, output=CLASSES),
    "finetune": lambda: vote.Wrapper(2, finetune=True, output=CLASSES),
    "share": lambda: vote.Wrapper(3, share=1, output=CLASSES),
    "rank1": lambda: vote.Wrapper(3, share="rank1", alpha=0.5, output=CLASSES),
    "prior": lambda: vote.Wrapper(2, prior=1.0, output=CLASSES),
    "sculpt": lambda: sculpt.Wrapper(sculpt.Laplace, n_layers=1),
    "sample": lambda: sample.Wrapper(3, sample.Bernoulli(0.3), output=CLASSES),
    "all": lambda: compose(vote.Wrapper(2, output=CLASSES), neo.Wrapper()),
}


def bert(**options: Any) -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **options)).eval()


def decoder() -> Any:
    config = transformers.GPT2Config(
        vocab_size=30, n_layer=1, n_head=2, n_embd=8, n_positions=32, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def answers(model: Any) -> list[torch.Tensor]:
    """Prediction and risks, with the same random numbers each time."""
    torch.manual_seed(7)
    with torch.no_grad():
        y, risk = model(IDS, return_risk=True)
    risks = [risk[name] for name in risk.names()] if hasattr(risk, "names") else [risk]
    return [y.logits, *(each.logits if hasattr(each, "logits") else each for each in risks)]


@pytest.mark.parametrize("name", ["vote", "finetune", "share", "all"])
def test_weights_for_the_plain_class_are_no_unexpected_keys(name: str, tmp_path: Path) -> None:
    """As the Trainer loads a checkpoint, which reports such keys."""
    from safetensors.torch import load_file

    wrapped, other = WRAPPERS[name]()(bert()), WRAPPERS[name]()(bert())
    wrapped.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    report = other.load_state_dict({**state, "new.weight": torch.ones(1)}, strict=False)
    assert report.unexpected_keys == ["new.weight"]
    assert not [key for key in report.missing_keys if "@" in key and "density" not in key]
    assert all(
        torch.equal(value, other.state_dict()[key]) for key, value in wrapped.state_dict().items() if "@vote" in key
    )


def same(one: Any, other: Any) -> bool:
    first, second = answers(one), answers(other)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapped_model_comes_back_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    wrapped = WRAPPERS[kind]()(bert()).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if wrapped.needs_fit:
        wrapped.fit([IDS, IDS + 1])
    before = torch.get_rng_state()
    wrapped.save_pretrained(tmp_path)
    again = workbench.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(again)._plain_class is transformers.BertForSequenceClassification
    assert not again.training
    assert again.methods == wrapped.methods
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in wrapped.state_dict().items())
    assert same(again, wrapped)
    assert not [file.name for file in tmp_path.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]


def test_units_come_along(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2)(bert()).eval()
    wrapped.scale(y_mean=torch.ones(3), y_scale=torch.full((3,), 2.0))
    wrapped.save_pretrained(tmp_path)
    assert same(workbench.from_pretrained(tmp_path), wrapped)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        transformers.BertForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize("shards", [None, "2KB"])
def test_tied_weights_shards_and_types_of_numbers(shards: str | None, tmp_path: Path) -> None:
    plain = decoder().to(torch.bfloat16)
    wrapped = vote.Wrapper(2, output={"logits": Logits(dim=-1)})(plain).eval()
    wrapped.save_pretrained(tmp_path)
    if shards:
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.mul_(1.5)
        wrapped.save_pretrained(tmp_path, max_shard_size=shards)  # into the folder of the former
    again = workbench.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert all(voter.transformer.wte.weight is voter.lm_head.weight for voter in again.voters())
    assert same(again, wrapped)
    assert again.generation_config.pad_token_id == 0


def test_attention_is_computed_in_the_same_way(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2, output=CLASSES)(bert(attn_implementation="eager")).eval()
    wrapped.save_pretrained(tmp_path)
    again = workbench.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "eager"
    assert same(again, wrapped)


def test_the_card_says_what_a_reader_has_to_know(tmp_path: Path) -> None:
    plain = bert()
    plain.config._name_or_path = "google/bert-tiny"
    wrapped: Any = vote.Wrapper(2, output=CLASSES)(plain)
    wrapped.save_pretrained(tmp_path)
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "google/bert-tiny"
    assert card.data.library_name == "workbench"
    assert "vote" in card.data.tags
    for words in (
        "`n_voters=2`",
        "workbench.from_pretrained",
        workbench.__version__,
        torch.__version__,
        "google/bert-tiny",
    ):
        assert words in card.text
    (tmp_path / "README.md").write_text("mine")
    wrapped.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def card_of(folder: Path) -> str:
    text = (folder / "README.md").read_text()
    return text[text.index("## Data") : text.index("## Load it")]


@pytest.mark.slow
def test_the_card_says_of_the_data_what_is_known_and_no_more(tmp_path: Path) -> None:
    labels = torch.arange(20) % 3
    ids = torch.randint(20, (20, 6))
    data = workbench.data.Data.from_arrays(
        ids, labels, test=[0, 1, 2, 3], features=[f"word {i}" for i in range(6)], name="words"
    )
    wrapped: Any = vote.Wrapper(2, output=CLASSES)(bert())
    wrapped.save_pretrained(tmp_path)
    assert "not recorded" in card_of(tmp_path)
    assert "used by" not in card_of(tmp_path)

    for _ in range(2):  # the same rows once more are the same rows
        workbench.fit(wrapped, data, epochs=1, validation=0.25, progress=False)
    workbench.fit(wrapped, (ids, labels), epochs=1, validation=0, progress=False)
    wrapped.save_pretrained(tmp_path / "trained", data="Titles of books | 1900 to 1950.")
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    expected = f"""## Data

Titles of books | 1900 to 1950.

| data | rows | columns | checksum | used by |
|---|---|---|---|---|
| words, split 0 | 12, and 4 to validate on | {", ".join(f"word {i}" for i in range(6))} | sha256 {data.checksum} | workbench.fit, {today} |
| not recorded | 20 | not recorded | not recorded | workbench.fit, {today} |

"""
    assert card_of(tmp_path / "trained") == expected
    again = workbench.from_pretrained(tmp_path / "trained")
    again.save_pretrained(tmp_path / "again")
    assert card_of(tmp_path / "again") == expected
    workbench.save(again, tmp_path / "file.safetensors")
    loaded = workbench.load(tmp_path / "file.safetensors", bert())
    loaded.save_pretrained(tmp_path / "loaded", data="Other words.")
    assert card_of(tmp_path / "loaded") == expected.replace("Titles of books | 1900 to 1950.", "Other words.")
    for said in (3, " "):
        with pytest.raises(TypeError, match="data: found"):
            wrapped.save_pretrained(tmp_path / "trained", data=said)


def test_rows_of_loaders_are_known_where_all_of_a_dataset_are_taken(tmp_path: Path) -> None:
    rows = torch.utils.data.TensorDataset(torch.randint(20, (12, 6)), torch.arange(12) % 3)
    some = torch.utils.data.SubsetRandomSampler([0, 1, 2, 3])
    for loader, said in (
        (torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True), "| not recorded | 12 |"),
        (torch.utils.data.DataLoader(rows, batch_size=4, sampler=some), "| not recorded | not recorded |"),
    ):
        wrapped: Any = vote.Wrapper(2, output=CLASSES)(bert())
        workbench.fit(wrapped, loader, epochs=1, validation=0, progress=False)
        wrapped.save_pretrained(tmp_path)
        assert said in card_of(tmp_path)


# ---- adapters
def adapted() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", init_lora_weights=False)
    return peft.get_peft_model(bert(), config).eval()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_models_of_peft_come_back(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(3, output=CLASSES)(adapted()).eval()
    wrapped.save_pretrained(tmp_path)
    again = workbench.from_pretrained(tmp_path)
    assert type(again)._plain_class is type(wrapped)._plain_class
    assert same(again, wrapped)
    other = adapted()
    assert same(workbench.from_pretrained(tmp_path, other), wrapped)
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in wrapped.named_parameters() if p.requires_grad
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("native", [True, False])
def test_adapters_inside_a_model_are_never_saved_alone_or_lost(native: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def make() -> Any:
        model = adapted().get_base_model()
        if native:
            model = bert()
            try:
                model.add_adapter(peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))
            except ValueError as error:
                pytest.skip(str(error))  # transformers 5.24 asks for a peft that is newer than any
        return model.eval()

    wrapped = vote.Wrapper(2, output=CLASSES)(make()).eval()
    wrapped.save_pretrained(tmp_path)
    assert same(workbench.from_pretrained(tmp_path, make()), wrapped)
    with pytest.raises(ValueError, match="does not"):
        workbench.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        transformers.BertForSequenceClassification.from_pretrained(tmp_path)


# ---- refusals
class Own(nn.Module):
    pass


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(2, output=CLASSES)(bert())
    for option in ({"push_to_hub": True}, {"variant": "fp16"}):
        with pytest.raises(TypeError, match=next(iter(option))):
            wrapped.save_pretrained(tmp_path / "none", **option)
    assert not (tmp_path / "none").exists()
    with pytest.raises(FileNotFoundError, match="snapshot_download"):
        workbench.from_pretrained("somebody/a-model")
    bert().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="names no wrappers"):
        workbench.from_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="empty folder"):  # the plain class would read what is there
        vote.Wrapper(2, share="rank1")(bert()).save_pretrained(tmp_path / "plain")
    wrapped.save_pretrained(tmp_path / "saved")
    other = transformers.BertForTokenClassification(transformers.BertConfig(**{**SMALL, "num_labels": 4}))
    with pytest.raises(ValueError, match="does not"):
        workbench.from_pretrained(tmp_path / "saved", other)
    note = tmp_path / "saved" / "workbench.json"
    whole = note.read_text()
    note.write_text(whole.replace("n_voters", "n_votes"))
    with pytest.raises(ValueError, match="checksum"):
        workbench.from_pretrained(tmp_path / "saved")
    note.write_text(whole[:40])
    with pytest.raises(ValueError, match="damaged"):
        workbench.from_pretrained(tmp_path / "saved")
    note.write_text(whole)
    weights = tmp_path / "saved" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        workbench.from_pretrained(tmp_path / "saved")


def test_classes_that_transformers_does_not_have_are_given(tmp_path: Path) -> None:
    class Mine(transformers.BertForSequenceClassification):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = 2 * out.logits
            return out

    wrapped = vote.Wrapper(2, output=CLASSES)(Mine(transformers.BertConfig(**SMALL))).eval()
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"from_pretrained\(folder, model\)"):
        workbench.from_pretrained(tmp_path)
    assert same(workbench.from_pretrained(tmp_path, Mine), wrapped)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Mine"]


class Seen(transformers.BertForSequenceClassification):
    """Has a state that is no tensor."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: Any = {"rows": 0, "sizes": ()}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "all"])
def test_states_with_numbers_and_texts(name: str, tmp_path: Path) -> None:
    config = transformers.BertConfig(**SMALL)
    wrapped = WRAPPERS[name]()(Seen(config)).eval()
    wrapped.seen |= {"rows": 7, "sizes": (3, 5)}
    wrapped.save_pretrained(tmp_path)
    for model in (Seen, Seen(config), WRAPPERS[name]()(Seen(config))):
        again = workbench.from_pretrained(tmp_path, model)
        assert again.seen == {"rows": 7, "sizes": (3, 5)}
        assert all(torch.equal(*pair) for pair in zip(answers(again), answers(wrapped.eval()), strict=True))
    with pytest.raises(ValueError, match="_extra_state only in the file"):
        workbench.from_pretrained(tmp_path, bert())


def test_states_that_no_file_can_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = Seen(transformers.BertConfig(**SMALL))
    model.seen = {"rows": object()}
    with pytest.raises(TypeError, match="_extra_state in the state_dict is or holds a object"):
        vote.Wrapper(2, output=CLASSES)(model).save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
