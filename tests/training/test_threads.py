"""Two threads that train one model at the same time, and the threads in which torch computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from workbench import fit, sculpt, vote
from workbench.training import exclusive


def test_a_second_training_of_the_same_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    wrapped, other = sculpt.Wrapper(n_layers=1)(model), sculpt.Wrapper(n_layers=1)(model)
    x = torch.linspace(-1, 1, 40)[:, None]
    begun, go_on = threading.Event(), threading.Event()

    def callback(_: Any) -> None:
        begun.set()
        go_on.wait(30)

    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(fit(wrapped, (x, x), epochs=1, progress=False, callback=callback)), name="first"
    )
    thread.start()
    try:
        assert begun.wait(30)
        before = {name: value.clone() for name, value in wrapped.state_dict().items() if value.is_floating_point()}
        for again in (wrapped, other):  # the second shares the trunk
            with pytest.raises(RuntimeError, match="is already being trained in thread first: wait for it to finish"):
                fit(again, (x, x), epochs=1, progress=False)
        assert all(torch.equal(value, wrapped.state_dict()[name]) for name, value in before.items())
        fit(vote.Wrapper(2)(nn.Linear(1, 1)), (x, x), epochs=1, progress=False)  # another model
    finally:
        go_on.set()
        thread.join()
    assert len(results) == 1
    fit(wrapped, (x, x), epochs=1, progress=False)
    with pytest.raises(ValueError, match="epochs"):
        fit(wrapped, (x, x), epochs=0, progress=False)
    fit(wrapped, (x, x), epochs=1, progress=False)  # one that was refused leaves nothing behind


def test_ctrl_c_at_any_line_stops_no_later_training() -> None:
    wrapped, trained = nn.Linear(1, 1), []
    train = exclusive.one_at_a_time(trained.append)
    for k in range(40):
        lines = 0

        def interrupt(frame: FrameType, event: str, argument: Any, k: int = k) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != exclusive.__file__:
                return None
            lines += event == "line"
            if event == "line" and lines == k + 1:
                raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            train(wrapped)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        exclusive._TRAININGS.clear()  # one that is left where the trace stops the line that takes it out, which no signal does
        for thread in (threading.Thread(target=train, args=[wrapped], daemon=True) for _ in range(2)):
            thread.start()
            thread.join(10)
            assert not thread.is_alive(), f"stopped for good by Ctrl-C at line {k}"
        train(wrapped)
        if lines <= k:
            return  # it came to its end
    raise AssertionError("more lines than were tried")


@pytest.mark.parametrize(
    ("inputs", "hidden", "folds", "expected"),
    [(3, 8, None, 1), (3, 8, 2, 1), (3, 20_000, None, 2), (None, 8, None, 2)],
    ids=["table", "folds", "large", "images"],
)
def test_small_steps_run_in_one_thread_and_nothing_else_does(
    inputs: int | None, hidden: int, folds: int | None, expected: int
) -> None:
    """Numbers are those of steps in several threads."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((40, 3) if inputs else (40, 1, 3, 1), generator=generator)
    y = x.sum(tuple(range(1, x.dim())))[:, None]
    before, trained, seen = torch.get_num_threads(), [], []

    def callback(_: Any) -> None:
        seen.append((torch.get_num_threads(), in_another_thread(torch.get_num_threads)))

    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            wrapped = vote.Wrapper(2)(
                nn.Sequential(nn.Flatten(), nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1))
            )
            fit(wrapped, (x, y), epochs=2, folds=folds, progress=False, callback=callback if threads == 2 else None)
            assert torch.get_num_threads() == threads
            trained.append(torch.cat([p.detach().flatten() for p in wrapped.parameters()]))
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {(expected, 2)}
    if hidden == 8:
        assert torch.equal(*trained)
    else:  # sums of many numbers are rounded in another order, and Adam enlarges the rounding of tiny gradients
        torch.testing.assert_close(*trained, rtol=0, atol=1e-3)


def in_another_thread(function: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]
