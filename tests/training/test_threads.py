"""Two threads that train one model at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from workbench import fit, sculpt, vote


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
            with pytest.raises(RuntimeError, match="is being trained already, in thread first: wait for its end"):
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
