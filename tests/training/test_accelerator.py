"""A loop with accelerate: preparing, accumulating, clipping, half precision and saved states agree with plain voters in a torch loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from workbench import compose, neo, sculpt, vote
from workbench.outputs import Logits

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:vote. the model gives a number", "ignore::DeprecationWarning")

IDS = torch.randint(3, 30, (16, 5), generator=torch.Generator().manual_seed(0))
BATCHES = [{"input_ids": rows, "labels": rows} for rows in IDS.split(4)]


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """The precision of the first Accelerator holds for the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def _wrapped() -> Any:
    config = transformers.GPT2Config(
        vocab_size=30, n_layer=1, n_head=2, n_embd=8, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return vote.Wrapper(2, output={"logits": Logits(dim=-1)})(transformers.GPT2LMHeadModel(config))


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def _learned(voters: list[nn.Module]) -> dict[str, Tensor]:
    names = [name for name, _ in voters[0].named_parameters()]
    return {name: torch.stack([voter.get_parameter(name).detach() for voter in voters]) for name in names}


def _plain_steps(voters: list[Any], precision: str) -> None:
    """The same loop by hand: the mean loss of the voters, accumulated over two batches, clipped over all."""
    parameters = [p for voter in voters for p in voter.train().parameters()]
    optimizer = _optimizer(parameters)
    half = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    for k, batch in enumerate(BATCHES):
        with half:
            loss = torch.stack([voter(**batch).loss.float() for voter in voters]).mean()
        (loss / 2).backward()
        if k % 2:
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
            optimizer.zero_grad()


def _accelerated(model: Any, precision: str) -> tuple[Any, Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, _optimizer(model.parameters()))
    return accelerator, prepared, optimizer


def _steps(accelerator: Any, model: Any, optimizer: Any) -> None:
    model.train()
    for batch in BATCHES:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 3e-3)])
def test_a_loop_of_accelerate_trains_plain_voters(precision: str, tolerance: float) -> None:
    wrapped = _wrapped()
    voters = wrapped.voters()
    before = _learned(voters)
    _plain_steps(voters, precision)
    accelerator, prepared, optimizer = _accelerated(wrapped, precision)
    _steps(accelerator, prepared, optimizer)
    expected, present = _learned(voters), _learned(accelerator.unwrap_model(prepared).voters())
    moved = max(float((expected[name] - before[name]).abs().max()) for name in expected)
    assert moved > 10 * tolerance
    for name, value in expected.items():
        torch.testing.assert_close(present[name], value, atol=tolerance, rtol=0)
    output, risk = accelerator.unwrap_model(prepared).eval()(IDS, return_risk=True)
    with torch.no_grad():
        probs = torch.stack([voter.eval()(IDS).logits.softmax(-1) for voter in voters])
    torch.testing.assert_close(output.logits.softmax(-1), probs.mean(0), atol=tolerance, rtol=0)
    assert bool((risk.epistemic.logits > 0).all())


def test_a_saved_state_goes_on_where_it_was(tmp_path: Path) -> None:
    accelerator, model, optimizer = _accelerated(_wrapped(), "no")
    _steps(accelerator, model, optimizer)
    accelerator.save_state(tmp_path)
    _steps(accelerator, model, optimizer)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    accelerator.load_state(tmp_path)
    _steps(accelerator, model, optimizer)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator, other, optimizer = _accelerated(_wrapped(), "no")  # in another process
    accelerator.load_state(tmp_path)
    _steps(accelerator, other, optimizer)
    for each in (model, other):
        for name, parameter in each.named_parameters():
            assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("fit", [False, True])
def test_a_density_comes_back_from_a_saved_state(fit: bool, tmp_path: Path) -> None:
    x = torch.randn(32, 3)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    wrapped, other = (compose(vote.Wrapper(2), neo.Wrapper())(network).eval() for _ in range(2))
    if fit:
        wrapped.fit(x)
    accelerate.Accelerator(cpu=True).save_model(nn.Sequential(wrapped), tmp_path)  # safetensors, as `save_state` writes
    safetensors.torch.load_model(nn.Sequential(other), tmp_path / "model.safetensors")
    assert torch.equal(other(x), wrapped(x))
    if fit:
        assert torch.equal(other(x, return_risk=True)[1].vacuitic, wrapped(x, return_risk=True)[1].vacuitic)


def test_risks_are_gathered_one_by_one() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(5, 3), batch_size=2))
    wrapped = accelerator.prepare(compose(vote.Wrapper(2), sculpt.Wrapper())(nn.Linear(3, 1)).eval())
    risks = [wrapped(x, return_risk=True)[1].map(accelerator.gather_for_metrics) for x in loader]
    wanted = [wrapped(x, return_risk=True)[1] for x in loader]
    for name in ("aleatoric", "epistemic", "total"):
        assert torch.equal(torch.cat([risk[name] for risk in risks]), torch.cat([risk[name] for risk in wanted]))


@pytest.mark.parametrize("empty", [lambda: torch.device("meta"), accelerate.init_empty_weights])
def test_a_model_without_memory_is_loaded_by_assignment(empty: Any, tmp_path: Path) -> None:
    wrapper, x = compose(vote.Wrapper(2), sculpt.Wrapper()), torch.randn(5, 3)
    wrapped = wrapper(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))).eval()
    torch.save(wrapped.state_dict(), tmp_path / "state.pt")
    with empty():
        other = wrapper(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))).eval()
    assert other[0].weight.is_meta
    with pytest.raises(ValueError, match="settings@workbench"):
        accelerate.load_checkpoint_and_dispatch(other, str(tmp_path / "state.pt"), device_map={"": "cpu"})
    with empty():
        other = wrapper(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))).eval()
    other.load_state_dict(torch.load(tmp_path / "state.pt"), assign=True)
    other = accelerate.dispatch_model(other, {"": "cpu"})
    (y, risk), (wanted, wanted_risk) = other(x, return_risk=True), wrapped(x, return_risk=True)
    assert torch.equal(y, wanted)
    assert all(torch.equal(risk[name], wanted_risk[name]) for name in ("aleatoric", "epistemic", "total"))
