"""Quantized layers as a trunk shared by all voters: bitsandbytes, torchao, and layers that behave like them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench
from workbench import sample, sculpt, vote
from workbench.outputs import Logits

IDS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))
OUTPUT = {"logits": Logits(dim=-1)}


class _Scaled(nn.Parameter):
    """Whole numbers, whose scale is an attribute."""

    scale: Tensor | None

    def __deepcopy__(self, memo: Any) -> _Scaled:
        new = _Scaled(self.data.clone(), requires_grad=False)
        new.scale = copy.deepcopy(self.scale, memo)
        return new


class _Product(torch.autograd.Function):
    """A product with a quantized weight that torch's transforms do not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.weight = weight.to(x.dtype) * scale
        return x @ ctx.weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.weight, None, None


class _Quantized(nn.Module):
    """A linear layer in eight bits: its first call moves the scale from the weight into the layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = _Scaled((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.weight.scale, self.scale = scale, None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.scale is not None:
            self.scale, self.weight.scale = self.weight.scale, None
        # without its scale a layer would go on with the whole numbers, as that of bitsandbytes does
        return _Product.apply(x, self.weight, torch.ones(1) if self.scale is None else self.scale)


def _net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = [_Quantized(nn.Linear(3, 6, bias=False)), nn.ReLU(), nn.Linear(6, 6), nn.ReLU()]
        return nn.Sequential(*trunk, _Quantized(nn.Linear(6, 6, bias=False)), nn.Linear(6, 2))


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("training", [False, True])
def test_scales_that_the_first_call_moves_are_refused_by_name_and_stay(training: bool) -> None:
    model = _net().train(training)
    wrapped = vote.Wrapper(2)(model)
    with pytest.raises(RuntimeError, match=r"'0\.weight', a _Scaled.*call the model once"):
        wrapped(X, return_risk=True)
    assert model[0].weight.scale is not None
    torch.testing.assert_close(model(X), _net()(X))


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("share", [None, 1])
def test_voters_on_a_quantized_trunk_answer_and_learn_as_plain_copies(strategy: str, share: int | None) -> None:
    model = _net()
    model(X)
    wrapped = vote.Wrapper(3, share=share, strategy=strategy)(model)
    assert {name.partition("@")[0] for name, _ in wrapped.named_parameters() if "@" in name} == {
        *(("2.weight", "2.bias") if share is None else ()),
        *("5.weight", "5.bias"),
    }
    plain = wrapped.voters()
    y, risk = wrapped(X, return_risk=True)
    answers = torch.stack([voter(X) for voter in plain])
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0), atol=1e-5, rtol=1e-3)
    y.square().sum().backward()
    answers.mean(0).square().sum().backward()
    for name, parameter in wrapped.named_parameters():
        if "@vote" in name:
            expected = torch.stack([voter.get_parameter(name.partition("@")[0]).grad for voter in plain])
            torch.testing.assert_close(parameter.grad, expected)


class _Packed(_Quantized):
    """Packs its weight where no gradient is wanted, as the layers of bitsandbytes in four bits do; then there is none any more."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.weight.data = self.weight.data.flip(0)
        return super().forward(x)


def test_a_weight_that_is_packed_for_calls_without_gradients_is_refused() -> None:
    model = nn.Sequential(_Packed(nn.Linear(3, 6, bias=False)), nn.Linear(6, 2))
    model(X)
    before = model[0].weight.data_ptr()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"repacks what its parameter '0\.weight'"):
        vote.Wrapper(2)(model).eval()(X)
    assert model[0].weight.data_ptr() == before


# ---- those of other packages
def _decoder(bits: int, folder: Path) -> Any:
    """A small decoder in four or eight bits, with trained adapters."""
    pytest.importorskip("bitsandbytes")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if not folder.exists():
            transformers.LlamaForCausalLM(config).save_pretrained(folder)
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder,
            quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8),
            device_map={"": "cpu"},
        )
        adapters = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        return peft.get_peft_model(model, adapters)


def _voters_by_hand(wrapped: Any, bits: int, folder: Path) -> list[Any]:
    """Models that are loaded anew, each with the adapters of a voter."""
    each = []
    for i in range(2):
        voter = _decoder(bits, folder)
        for layer in voter.modules():
            layer.support_avx512bf16_for_cpu = False  # for kernels without gradients, and with other numbers
        for name, parameter in voter.named_parameters():
            if f"{name}@vote" in dict(wrapped.named_parameters()):
                parameter.data.copy_(wrapped.get_parameter(f"{name}@vote")[i].detach())
        each.append(voter)
    return each


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_on_a_base_of_bitsandbytes_learn_as_those_of_plain_models(bits: int, tmp_path: Path) -> None:
    base = _decoder(bits, tmp_path / "base")
    wrapped = vote.Wrapper(2, output=OUTPUT)(base)
    n_adapters = sum(p.numel() for p in base.parameters() if p.requires_grad)
    assert sum(p.numel() for p in wrapped.parameters()) == sum(p.numel() for p in base.parameters()) + n_adapters
    with torch.no_grad():  # between the epochs, and by the given model as well
        wrapped.eval()(input_ids=IDS)
        base.eval()(input_ids=IDS)
    for voters in (_voters_by_hand(wrapped, bits, tmp_path / "base"), wrapped.voters()):
        wrapped.zero_grad()
        wrapped.eval()(input_ids=IDS).logits.softmax(-1).square().sum().backward()
        probs = torch.stack([voter.eval()(input_ids=IDS).logits.softmax(-1) for voter in voters])
        torch.testing.assert_close(wrapped(input_ids=IDS).logits.softmax(-1), probs.mean(0))
        probs.mean(0).square().sum().backward()
        named = [dict(voter.named_parameters()) for voter in voters]
        learned = [(name, p) for name, p in wrapped.named_parameters() if p.requires_grad]
        assert len(learned) == 8
        for name, parameter in learned:
            expected = torch.stack([parameters[name.partition("@")[0]].grad for parameters in named])
            torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-3)
    wrapped.zero_grad()
    with pytest.warns(workbench.errors.WorkbenchWarning, match="a number for all rows"):
        wrapped.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert all(bool(parameter.grad.any()) for _, parameter in learned)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_of_bitsandbytes_is_saved_and_copied(bits: int, tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(2, output=OUTPUT)(_decoder(bits, tmp_path / "base")).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    expected = wrapped(input_ids=IDS).logits
    workbench.save(wrapped, tmp_path / "model")
    again = workbench.load(tmp_path / "model", _decoder(bits, tmp_path / "base")).eval()
    stated: Any = vote.Wrapper(2, output=OUTPUT)(_decoder(bits, tmp_path / "base")).eval()
    stated.load_state_dict(wrapped.state_dict())
    wrapped.save_pretrained(tmp_path / "folder")
    resumed: Any = vote.Wrapper(2, output=OUTPUT)(_decoder(bits, tmp_path / "base")).eval()
    resumed.load_adapter(tmp_path / "folder", "default")  # as a Trainer goes on from a checkpoint
    pretrained = workbench.from_pretrained(tmp_path / "folder", _decoder(bits, tmp_path / "base"))
    with pytest.raises(ValueError, match=r"quantized \(bitsandbytes\).*from_pretrained\(folder, model\)"):
        workbench.from_pretrained(tmp_path / "folder")
    for model in (again, stated, resumed, pretrained, copy.deepcopy(wrapped)):
        torch.testing.assert_close(model(input_ids=IDS).logits, expected)


def _classifier(folder: Path, seed: int = 0, **quantized: Any) -> Any:
    """A small classifier on a frozen base in four bits, with a head that learns; another seed is another base."""
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.BertConfig(vocab_size=64, num_labels=3, **options)
        transformers.BertForSequenceClassification(config).save_pretrained(folder / str(seed))
    quantized = {"load_in_4bit": True, "llm_int8_skip_modules": ["classifier"], **quantized}
    model = transformers.BertForSequenceClassification.from_pretrained(
        folder / str(seed), quantization_config=transformers.BitsAndBytesConfig(**quantized), device_map={"": "cpu"}
    ).eval()
    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    return model


@pytest.mark.parametrize("double", [False, True])
def test_a_base_in_four_bits_is_that_of_the_file(double: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    options = {"bnb_4bit_use_double_quant": double, "bnb_4bit_quant_type": "nf4"}
    wrapped: Any = vote.Wrapper(2, share=1, output={"logits": Logits()})(_classifier(tmp_path, **options)).eval()
    workbench.save(wrapped, tmp_path / "file")
    wrapped.save_pretrained(tmp_path / "folder")
    with torch.no_grad():
        expected = wrapped(IDS).logits
        others = [_classifier(tmp_path, 1, **options) for _ in range(3)]
        loaded = workbench.load(tmp_path / "file", others[0]).eval()
        pretrained = workbench.from_pretrained(tmp_path / "folder", others[1])
        stated = vote.Wrapper(2, share=1, output={"logits": Logits()})(others[2]).eval()
        before = stated(IDS).logits
        assert not torch.allclose(before, expected)
        state = wrapped.state_dict()
        name = "bert.encoder.layer.0.attention.self.query.weight"
        with pytest.raises(RuntimeError, match="classifier"):
            stated.load_state_dict({key: value for key, value in state.items() if key != "classifier.weight@vote"})
        with pytest.raises(RuntimeError, match=r"query\.weight\.absmax"):
            stated.load_state_dict({key: value for key, value in state.items() if not key.startswith(f"{name}.")})
        assert torch.equal(stated(IDS).logits, before)
        stated.load_state_dict(state)
        for model in (loaded, pretrained, stated):
            torch.testing.assert_close(model(IDS).logits, expected)
        for layer in others[0].modules():  # whose base it is; a kernel of bitsandbytes would round more
            layer.support_avx512bf16_for_cpu = False
        torch.testing.assert_close(others[0].bert(IDS).pooler_output, wrapped.bert(IDS).pooler_output)
        other = _classifier(tmp_path, **{**options, "bnb_4bit_quant_type": "fp4"})
        with pytest.raises(ValueError, match="quantized otherwise: quant_type is nf4 in the state, fp4 here"):
            workbench.load(tmp_path / "file", other)


def test_the_plain_class_finds_no_weights_of_a_quantized_base(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(2, share=1, output={"logits": Logits()})(_classifier(tmp_path)).eval()
    wrapped.save_pretrained(tmp_path / "folder")  # it would make a head anew
    with pytest.raises(OSError, match=r"model\.safetensors"):
        type(wrapped)._plain_class.from_pretrained(tmp_path / "folder")


def _perceptron() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def _by_torchao(names: tuple[str, ...] = ("0", "2")) -> nn.Sequential:
    quantization, model = pytest.importorskip("torchao.quantization"), _perceptron()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name in names)
    return model


def _by_quanto(bits: int = 8) -> nn.Sequential:
    """All layers but the last, frozen as those of other packages are."""
    quanto, model = pytest.importorskip("optimum.quanto"), _perceptron()
    quanto.quantize(model, weights=getattr(quanto, f"qint{bits}"), exclude="4")
    quanto.freeze(model)
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    return model


BY = {"torchao": _by_torchao, "quanto": _by_quanto, "quanto in four bits": lambda: _by_quanto(4)}


@pytest.mark.parametrize("package", BY)
def test_a_trunk_of_other_packages_is_shared_trained_on_and_stays(package: str) -> None:
    model = BY[package]()
    model[:4].requires_grad_(False)
    x, y = torch.randn(40, 32), torch.randn(40, 2)
    features = model[:4](x).detach()
    wrapped = vote.Wrapper(2, share=1)(model)
    assert [name for name, _ in wrapped.named_parameters() if "@" in name] == ["4.weight@vote", "4.bias@vote"]
    options: dict[str, Any] = {"validation": 0, "standardize": False, "progress": False, "batch_size": 40}
    start = [wrapped.get_parameter(f"4.{kind}@vote").detach().clone() for kind in ("weight", "bias")]
    workbench.fit(wrapped, (x, y), epochs=3, optimizer=lambda p: torch.optim.SGD(p, 0.1), **options)
    for voter in range(2):
        weight, bias = (part[voter].clone().requires_grad_() for part in start)
        optimizer = torch.optim.SGD([weight, bias], 0.05)  # of half of the mean over two voters
        for _ in range(3):
            optimizer.zero_grad()
            (features @ weight.T + bias - y).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(wrapped.get_parameter("4.weight@vote")[voter], weight, rtol=1e-4, atol=1e-5)
    answers = torch.stack([features @ wrapped.voters()[i][4].weight.T + wrapped.voters()[i][4].bias for i in range(2)])
    torch.testing.assert_close(wrapped.eval()(x), answers.mean(0), rtol=1e-4, atol=1e-5)
    workbench.fit(sculpt.Wrapper(n_layers=1)(BY[package]()), (x, y), epochs=1, **options)
    wrapped.to("cpu").float()
    with pytest.raises(RuntimeError, match=r"'0\.weight' of Sequential is quantized.*move the plain model"):
        wrapped.to("meta")
    torch.testing.assert_close(wrapped(x), answers.mean(0), rtol=1e-4, atol=1e-5)


def test_files_of_weights_of_several_parts_are_refused_by_name(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(2, share=1)(_by_torchao())
    with pytest.raises(TypeError, match=r"0\.weight is quantized \(Int8Tensor\).*torch\.save"):
        workbench.save(wrapped, tmp_path / "file")
    torch.save(wrapped.state_dict(), tmp_path / "state")
    again: Any = vote.Wrapper(2, share=1)(_by_torchao())
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    x = torch.ones(3, 32)
    torch.testing.assert_close(again.eval()(x), wrapped.eval()(x))


def test_weights_of_quanto_are_saved_and_have_no_copies(tmp_path: Path) -> None:
    wrapped: Any = vote.Wrapper(2, share=1)(_by_quanto()).eval()
    with pytest.raises(
        RuntimeError, match=r"weight of this model is quantized \(WeightQBytesTensor\), and has no copies"
    ):
        copy.deepcopy(wrapped)
    workbench.save(wrapped, tmp_path / "file")
    x = torch.ones(3, 32)
    torch.testing.assert_close(workbench.load(tmp_path / "file", _by_quanto()).eval()(x), wrapped(x))


def test_layers_of_quanto_that_are_not_frozen_are_no_voters() -> None:
    quanto, model = pytest.importorskip("optimum.quanto"), _perceptron()
    quanto.quantize(model, weights=quanto.qint8, exclude="4")
    with pytest.raises(TypeError, match=r"'0' is a QLinear of optimum-quanto that is not frozen.*quanto\.freeze"):
        vote.Wrapper(2)(model)
    wrapped: Any = vote.Wrapper(2, share=1)(model)
    workbench.fit(wrapped, (torch.randn(8, 32), torch.randn(8, 2)), epochs=1, validation=0, progress=False)


def test_weights_of_quanto_that_are_not_frozen_are_no_voters() -> None:
    model = _by_quanto()
    model[0].weight.requires_grad_(True)
    with pytest.raises(TypeError, match=r"'0\.weight' of Sequential is quantized.*requires_grad_\(False\)"):
        vote.Wrapper(2)(model)
    assert vote.Wrapper(2, share="rank1")(model)(torch.ones(3, 32)).shape == (3, 2)  # which shares it


def test_weights_of_torchao_are_a_trunk_and_get_no_heads_or_noise() -> None:
    quantized = _by_torchao
    x = torch.randn(6, 32)
    wrapped = vote.Wrapper(2, share=1)(quantized(("0", "2"))).eval()
    y = wrapped(x)
    torch.testing.assert_close(y, torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))
    y.sum().backward()
    assert wrapped.get_parameter("4.weight@vote").grad is not None
    assert sculpt.Wrapper(n_layers=1)(quantized(("0", "2")))(x, return_risk=True)[1].shape == (6, 2)
    with pytest.raises(TypeError, match=r"'4\.weight' of Sequential is quantized \(Int8Tensor\).*filter_fn"):
        sculpt.Wrapper(n_layers=1)(quantized(("0", "2", "4")))
    with pytest.raises(TypeError, match=r"'0\.weight' of Sequential is quantized.*where='activations'"):
        sample.Wrapper(where="weights")(quantized(("0",)))


def test_risk_heads_share_the_quantized_layers_before_their_last() -> None:
    model = _net()
    model(X)
    wrapped = sculpt.Wrapper(n_layers=2)(model)
    assert wrapped(X, return_risk=True)[1].shape == (5, 2)
    assert {name for name, _ in wrapped.named_parameters() if "@" in name} == {
        f"{n}.{kind}@sculpt" for n in (2, 5) for kind in ("weight", "bias")
    }
