"""The benchmark `speed`: its models, its comparisons, its page, and its clock on known cases."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

from workbench.experiments.worker import load_file

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    return load_file(BENCHMARKS / "speed.py")


def _part(name: str) -> Any:
    """A fixture: the module beside the benchmark that it has imported."""

    @pytest.fixture(scope="module", name=name)
    def module(speed: ModuleType) -> ModuleType:
        return sys.modules[f"speed_{name}"]

    return module


clock, models, cases, targets = map(_part, ("clock", "models", "cases", "targets"))


# ---- cells
def test_cells_are_json_differ_and_fit_into_a_quarter_of_an_hour(speed: ModuleType) -> None:
    cells = speed.cells()
    keys = [json.dumps(cell, sort_keys=True) for cell in cells]
    assert len(set(keys)) == len(keys) > 500
    here = [cell for cell in cells if cell["on"] == "cpu" and "model" in cell]
    assert sum(map(speed.seconds, here)) < 15 * 60
    assert {cell["model"] for cell in here} == {*speed.MODELS, "unet", "small"}
    assert {cell["wrapper"] for cell in here} == set(speed.WRAPPERS)
    aimed = [speed._aimed(cell) for cell in here]
    assert aimed.index(False) == sum(aimed)  # those of the targets come first
    assert {cell.get("how") for cell in speed.cells(smoke=True)} == {"auto", "tune", "compiled", None}


def test_what_is_told_first_on_a_gpu(speed: ModuleType, targets: ModuleType) -> None:
    cells = [cell for cell in speed.cells() if cell["on"] == "cuda"]
    about = [target for target in targets.TARGETS if target.case.startswith("GPU")]

    def kind(cell: dict[str, Any]) -> str:
        if "peer" in cell or cell["how"] == "compiled":
            return "peers" if "peer" in cell else "compiled"
        if any(target.holds(cell) for target in about):
            return "GPU"
        return "aimed" if speed._aimed(cell) else "others"

    assert list(dict.fromkeys(map(kind, cells))) == ["GPU", "aimed", "peers", "compiled", "others"]
    compiled = [(c["model"], c["n"], c["phase"]) for c in cells if kind(c) == "compiled" and c["wrapper"] == "vote"]
    assert compiled == [(m, n, p) for m in targets.LAUNCHES for n in (16, 5) for p in ("forward", "step")]
    assert sum(speed.seconds(cell) for cell in cells if kind(cell) == "GPU") < 240
    assert "lstm" in {cell["model"] for cell in cells if kind(cell) == "GPU"}


def test_what_is_compiled_takes_the_time_that_compiling_takes(speed: ModuleType) -> None:
    cell = speed._cell("mlp", "vote", 16, 64, "forward", on="cuda")
    assert speed.seconds({**cell, "how": "compiled"}) == pytest.approx(speed.seconds(cell) + 30)
    assert speed.seconds({**cell, "how": "compiled"}, compiling=0) == speed.seconds(cell)


def test_every_target_has_cells(speed: ModuleType, targets: ModuleType) -> None:
    cells = speed.cells()
    for target in targets.TARGETS:
        assert any(target.holds(cell) for cell in cells), target.case
    assert {target.case for target in targets.TARGETS} >= set(targets.REASONS)
    assert len({target.case for target in targets.TARGETS}) == len(targets.TARGETS)


def test_the_loop_is_measured_wherever_a_target_is_about_it(speed: ModuleType, targets: ModuleType) -> None:
    loops = [target for target in targets.TARGETS if target.column == "loop"]
    about = [cell for cell in speed.cells() if any(target.holds(cell) for target in loops)]
    assert about
    assert all(speed.with_loop(cell) for cell in about)


def test_a_cell_that_cannot_run_is_known_by_its_reason(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(speed.shutil, "which", lambda name: None)
    cell = speed.cells(smoke=True)[0]
    assert speed.possible(cell) == ""
    assert speed.possible({**cell, "on": "cuda"}) == "there is no CUDA device"
    assert speed.possible({**cell, "how": "compiled"}) == "there is no C++ compiler"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert speed.possible({**cell, "on": "cuda"}) == ""


# ---- models
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    "name",
    ["tiny", "mlp", "cnn", "resnet18", "transformer", "lstm", "gpt2", "unet", "resnet50", "vit", "gpt2-1024"],
)
def test_models_answer_and_cost_what_is_guessed(
    speed: ModuleType, models: ModuleType, clock: ModuleType, name: str, large: bool
) -> None:
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = models.build(name, large)
    x, y = models.batch_of(name, 2, large)
    assert model(x.to("meta")).shape == y.shape
    assert [part for part, _ in model.named_children()] == ["entry", "body", "head"]
    if name in models.BUSY and not large:  # for tests alone
        return
    guess = (speed.COST | speed.COST_LARGE if large else speed.COST)[name][0]
    assert clock.operations(model, x, False)[""] / 2e6 == pytest.approx(guess, rel=0.6 if name == "tiny" else 0.01)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "count"), [("resnet50", 25_557_032), ("vit", 86_567_656), ("gpt2-1024", 163_037_184)])
def test_busy_models_are_as_large_as_published(models: ModuleType, name: str, count: int) -> None:
    """Of torchvision's documentation, and the 124,439,808 of GPT-2 with a last layer of its own, of 50257 words and width 768."""
    with torch.device("meta"):
        model = models.build(name, large=True)
    assert sum(p.numel() for p in model.parameters()) == count
    assert count != 163_037_184 or count == 124_439_808 + 50_257 * 768


def test_the_decoder_looks_back_only(models: ModuleType) -> None:
    block = models.DecoderBlock(8, 2)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    changed = torch.cat([x[:, :3], torch.ones(2, 2, 8)], 1)
    torch.testing.assert_close(block(x)[:, :3], block(changed)[:, :3])
    assert not torch.allclose(block(x)[:, 3:], block(changed)[:, 3:])


# ---- what is compared with
@pytest.mark.slow
def test_the_loop_and_the_version_by_hand_are_the_same_work(cases: ModuleType) -> None:
    case = cases.case_of("mlp", "vote", 3, 4, "forward", "cpu", "float32", "auto", True)
    plain = case.passes["plain"]()
    for name in ("loop", "hand"):  # of copies that do not differ
        mean, std = case.passes[name]()
        torch.testing.assert_close(mean, plain, atol=1e-6, rtol=1e-5)
        assert std.max() < 1e-6
    y, risk = case.passes["wrapped"]()
    assert y.shape == risk.shape == plain.shape
    assert case.executor() == "vmap"


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention on a CPU
@pytest.mark.parametrize("name", ["tiny", "mlp", "cnn", "transformer"])
def test_torch_func_by_hand_is_the_same_work(cases: ModuleType, models: ModuleType, name: str) -> None:
    x, y = models.batch_of(name, 6)
    plain = models.build(name).eval()
    mean, std = cases._by_func(plain, 3, x, None, contextlib.nullcontext)()
    with torch.no_grad():
        torch.testing.assert_close(mean, plain(x), atol=1e-5, rtol=1e-4)
    assert std.max() < 1e-5
    stepped: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "_step", lambda loss, parameters, x, y: stepped.extend((loss, list(parameters))))
        cases._by_func(plain.train(), 3, x, y, contextlib.nullcontext)
    loss, parameters = stepped
    loss(x, y).backward()
    nn.MSELoss()(plain(x), y).backward()
    for stacked, (key, other) in zip(parameters, plain.named_parameters(), strict=True):
        for voter in 3 * stacked.grad:  # the loss is the mean over voters
            torch.testing.assert_close(voter, other.grad, atol=1e-5, rtol=1e-3, msg=key)


def test_what_torch_func_refuses_is_told(cases: ModuleType, models: ModuleType) -> None:
    case = cases.CellPasses()
    x = models.batch_of("lstm", 2)[0]
    case.add("func", cases._by_func(models.build("lstm").eval(), 2, x, None, contextlib.nullcontext))
    assert "func" not in case.passes
    assert "lstm" in case.refused["func"]


def test_a_gpu_has_the_version_by_torch_func(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cases, "_by_func", lambda *_: lambda: asked.append("func"))
    monkeypatch.setattr(Tensor, "to", lambda self, *_, **__: self)
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: self)
    monkeypatch.setattr(cases, "floor", lambda *_: (1.0, "bytes"))
    for wrapper, n, there in (("vote", 3, True), ("vote", 1, False), ("vote last", 3, False)):
        case = cases.case_of("mlp", wrapper, n, 4, "forward", "cuda", "float32", "auto", True)
        assert ("func" in case.passes) is there
    assert asked == ["func"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "vit", "gpt2-1024"])
def test_busy_models_in_small(speed: ModuleType, clock: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(clock, "ENOUGH", 0.0)
    row = speed.run(**speed._cell(name, "vote", 2, 2, "step", dtype="bfloat16"))
    assert row["utilization"] == pytest.approx(row["loop_ms"] / row["wrapped_ms"])
    assert row["tflops_wrapped"] == pytest.approx(row["utilization"] * row["tflops_loop"])
    assert row["tflops_best"] > 0
    assert row["loop"] > 0
    last = speed.run(**speed._cell(name, "vote last", 3, 2, "forward", dtype="bfloat16"))
    assert last["plain"] > 0
    assert "utilization" not in last


def test_utilization_is_operations_over_time(cases: ModuleType) -> None:
    utilization = cases.CellPasses(work=4e12, rate=20e12).utilization(0.5, 0.4)
    assert utilization == pytest.approx({"tflops_wrapped": 8, "tflops_loop": 10, "tflops_best": 20, "utilization": 0.8})


def test_a_target_of_utilization_is_the_least(targets: ModuleType) -> None:
    target = next(target for target in targets.TARGETS if target.column == "utilization")
    assert target.aim() == "at least 0.9 of the loop's utilization"
    assert target.worst([0.8, 0.95]) == 0.8
    assert [target.met(value) for value in (0.89, 0.9, 1.0)] == [False, True, True]
    loop = next(target for target in targets.TARGETS if target.column == "loop" and not target.faster)
    assert loop.worst([0.8, 0.95]) == 0.95
    assert [loop.met(loop.limit + more) for more in (-0.1, 0, 0.1)] == [True, True, False]


def test_steps_train_every_copy(cases: ModuleType, models: ModuleType) -> None:
    x, y = models.batch_of("mlp", 6)
    copies = [models.build("mlp") for _ in range(2)]
    reference = models.build("mlp")
    cases._steps(copies, x, y, torch.enable_grad)()
    optimizer = torch.optim.Adam(reference.parameters())
    nn.MSELoss()(reference(x), y).backward()
    optimizer.step()
    for copied in copies:
        for (name, parameter), other in zip(copied.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, msg=name)
            assert parameter.grad is None


def test_noise_enters_all_layers_but_the_first(cases: ModuleType, models: ModuleType) -> None:
    hooked: dict[str, list[str]] = {}
    for name in ("cnn", "gpt2"):
        noised = cases.noisy(models.build(name), last=False)
        hooked[name] = [path for path, module in noised.named_modules() if module._forward_pre_hooks]
    assert hooked["cnn"] == ["body.3", "body.7", "head"]
    assert len(hooked["gpt2"]) == 4 * 4 + 1
    last = cases.noisy(models.build("cnn"), last=True)
    assert [path for path, module in last.named_modules() if module._forward_pre_hooks] == ["head"]
    seen: list[Tensor] = []
    last.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        last(models.batch_of("cnn", 64)[0])
    assert 0.05 < (seen[0] == 0).float().mean() < 0.15


@pytest.mark.parametrize(
    ("wrapper", "phase", "wanted"),
    [
        ("neo", "forward", lambda n, whole, first, last, three: whole),
        ("sculpt 1", "forward", lambda n, whole, first, last, three: whole + last),
        ("sculpt", "forward", lambda n, whole, first, last, three: whole + three),
        ("vote last", "forward", lambda n, whole, first, last, three: whole + (n - 1) * last),
        ("vote of sculpt last", "forward", lambda n, whole, first, last, three: whole + (2 * n - 1) * last),
        ("vote", "step", lambda n, whole, first, last, three: n * whole),
        ("vote rank1", "forward", lambda n, whole, first, last, three: n * whole),
        ("vote dealt", "step", lambda n, whole, first, last, three: whole),
        ("sample", "forward", lambda n, whole, first, last, three: n * whole - (n - 1) * first),
        ("sample", "step", lambda n, whole, first, last, three: whole),
        ("sample last", "forward", lambda n, whole, first, last, three: whole + (n - 1) * last),
    ],
)
def test_the_floor_counts_what_is_shared_once(
    cases: ModuleType, models: ModuleType, monkeypatch: pytest.MonkeyPatch, wrapper: str, phase: str, wanted: Any
) -> None:
    n, rows = 5, 2
    x, plain = models.batch_of("cnn", rows)[0], models.build("cnn")
    first, second, third = (2 * rows * s * s * 9 * a * b for a, b, s in ((3, 16, 32), (16, 32, 16), (32, 64, 8)))
    last = 2 * rows * 64 * 10
    if phase == "step":  # gradients of all inputs but the model's own
        first, second, third, last = 2 * first, 3 * second, 3 * third, 3 * last
    monkeypatch.setattr(cases, "operations_a_second", lambda device, dtype: 1.0)
    monkeypatch.setattr(cases, "bytes_a_second", lambda device, size: math.inf)
    seconds, bound = cases.floor(plain, wrapper, n, x, phase, "cpu", "float32")
    assert bound == "operations"
    assert seconds == wanted(n, first + second + third + last, first, last, second + third + last)


def test_the_floor_of_bytes(cases: ModuleType, models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x, plain = models.batch_of("mlp", 1)[0], models.build("mlp")
    size = sum(p.numel() for p in plain.parameters())
    monkeypatch.setattr(cases, "operations_a_second", lambda device, dtype: math.inf)
    monkeypatch.setattr(cases, "bytes_a_second", lambda device, size: 2.0)
    wanted = {
        ("vote", "forward"): 4 * 5 * size,
        ("vote", "step"): 4 * 6 * 5 * size,
        ("vote last", "forward"): 4 * (size + 4 * 257),
        ("sample", "forward"): 4 * size,
        ("vote dealt", "step"): 4 * 6 * 5 * size,
    }
    for (wrapper, phase), moved in wanted.items():
        assert cases.floor(plain, wrapper, 5, x, phase, "cpu", "float32") == (moved / 2, "bytes")


@pytest.mark.slow
def test_the_guard_that_is_timed_is_the_one_of_calls(cases: ModuleType) -> None:
    case = cases.case_of("tiny", "neo", 1, 1, "forward", "cpu", "float32", "frozen", False)
    assert case.guard() is None
    for _ in range(20):
        case.passes["wrapped"]()
    guard = case.guard()
    assert guard() is True
    case.engine.entry.extra = 1  # which the block finds out at its end
    assert guard() is False


# ---- cells that run, and their page
@pytest.fixture(scope="module")
def rows(speed: ModuleType, clock: ModuleType) -> list[dict[str, Any]]:
    before = torch.get_rng_state()
    more = [
        speed._cell("tiny", "neo", 1, 1, "predict"),
        speed._cell("tiny", "sample last", 5, 64, "forward"),
        speed._cell("tiny", "vote dealt", 5, 64, "step", dtype="bfloat16"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "ENOUGH", 0.0)
        measured = [{**cell, **speed.run(**cell)} for cell in (*speed.cells(smoke=True)[:3], *more)]  # none compiled
    assert torch.equal(torch.get_rng_state(), before)
    return measured


@pytest.mark.slow
def test_what_a_cell_gives(rows: list[dict[str, Any]]) -> None:
    vote, sculpt, tuned, *_ = rows
    for row in rows:
        assert row["rounds"] >= 9
        assert row["plain_low"] <= row["plain"] <= row["plain_high"]
        assert row["floor"] == pytest.approx(row["wrapped_ms"] / row["floor_ms"])
        assert row["executor"] in ("vmap", "rescue", "replay", "loop")
        json.dumps(row)
    assert vote["plain"] > vote["loop"] > 0
    assert vote["hand"] > 0
    assert "loop" not in sculpt
    assert tuned["best_executor"] in ("vmap", "rescue", "replay", "loop")
    assert tuned["best"] > 0


@pytest.mark.slow
def test_the_page_of_some_cells(
    speed: ModuleType, targets: ModuleType, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    aimed = speed._cell("cnn", "vote last", 5, 64, "forward")
    like = {**rows[0], "hand": math.nan, "loop": math.nan}
    good, bad = {**like, **aimed, "plain": 1.123}, {**like, **aimed, "batch": 1024, "plain": 1.31}
    gpu = {**like, **speed._cell("mlp", "vote", 16, 64, "forward", on="cuda"), "hardware": "a GPU", "loop": 0.1}
    gpu |= {"loop_low": 0.1, "loop_high": 0.2, "func": 0.75}
    busy = {
        **gpu,
        **speed._cell("vit", "vote", 5, 32, "step", on="cuda", dtype="bfloat16"),
        "loop": 1.25,
        "func": math.nan,
    }
    busy |= {"tflops_wrapped": 320.0, "tflops_loop": 400.0, "tflops_best": 700.0, "utilization": 0.8}
    peer = {"peer": "laplace-torch", "task": "fit, 10 classes", "on": "cuda", "hardware": "a GPU", "wrapped_ms": 1.0}
    peer |= {"peer_ms": 4.0, "peer_ratio": 0.25, "peer_ratio_low": 0.2, "peer_ratio_high": 0.3}
    peer |= {"memory_wrapped": 1.0, "memory_peer": 2.0}
    case = "vote, last layer, n = 5: forward"
    monkeypatch.setitem(targets.REASONS, case, "it is a test.")
    text = speed.summary(pandas.DataFrame([*rows, good, gpu, busy, peer, bad]), tmp_path)
    assert text.count("\n### ") == 2
    lines = text.splitlines()
    assert (
        f"| {case} | at most 1.15 x a plain pass | 1.31 x a plain pass (cnn, batch 1024) | 1.22 x a plain pass | 2 | no |"
        in lines
    )
    assert f"- {case}: it is a test." in lines
    fast = "GPU, launch-bound models, vote, all layers, n = 16: forward"
    assert (
        f"| {fast} | at least 9 times faster | 10 times faster (mlp, batch 64) | 10 times faster | 1 | yes |" in lines
    )
    assert "| vit, vote, all layers, n = 5, batch 32, training step | 400 | 320 | 700 | 0.80 |" in lines
    used = "GPU, ResNet-50, ViT-B and GPT-2, bfloat16, vote: training step | at least 0.9 of the loop's utilization"
    assert (
        f"| {used} | 0.8 of the loop's utilization (vit, batch 32) | 0.8 of the loop's utilization | 1 | no |" in lines
    )
    assert any("mlp, torch.func" in line for line in lines)
    assert "| vote, last layer, n = 5 |  |  | 1.12 /  |  |  |  |  |" in lines
    told = f"- {fast}: at least 9 times faster"
    assert told not in lines
    assert told in speed.summary(pandas.DataFrame(rows), tmp_path).splitlines()  # of a machine without one
    assert "| laplace-torch: fit, 10 classes | 1.00 | 4.00 | 0.25 (0.2, 0.3) | 1.00 / 2.00 |" in lines
    assert "nan" not in text
    for name in ("cpu-ratios", "cpu-loops", "cuda-ratios", "cuda-loops"):
        assert f"(images/speed-{name}.png)" in text
        assert 5_000 < (tmp_path / f"speed-{name}.png").stat().st_size < 200_000
