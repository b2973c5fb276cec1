"""Calls that beginners get wrong: the error says what was found, and what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import workbench
from workbench import compose, fit, load, save, sculpt, vote
from workbench.data import Data
from workbench.data import load as load_data
from workbench.widgets import Comparison, Explorer

X = torch.linspace(0, 1, 160).reshape(40, 4)
Y = X.sum(1, keepdim=True)


def wrapped() -> Any:
    return vote.Wrapper(2)(nn.Linear(4, 1))


def told(call: Callable[[], Any], kind: type[Exception]) -> str:
    """Return what the error of a call says, with the notes that a traceback shows."""
    with pytest.raises(kind) as caught:
        call()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("epoch", "did you mean epochs?"),
        ("batchsize", "did you mean batch_size?"),
        ("learning_rate", "it is called lr here"),
        ("loss", "it is called criterion here"),
        ("zzz", "there are epochs, batch_size, lr"),
    ],
)
def test_fit_names_the_argument_that_is_meant(name: str, advice: str) -> None:
    assert f"fit has no argument {name!r}: {advice}" in told(lambda: fit(wrapped(), (X, Y), **{name: 1}), TypeError)


def test_inputs_and_targets_given_apart_to_fit_are_told_to_be_a_pair() -> None:
    assert "fit(wrapped, (x, y))" in told(lambda: fit(wrapped(), X, Y), TypeError)
    assert "'data'" in told(lambda: fit(wrapped()), TypeError)
    fit(wrapped=wrapped(), data=(X, Y), epochs=1, progress=False)


def test_fit_names_the_rows_that_the_model_does_not_take() -> None:
    said = told(lambda: fit(wrapped(), (X[:, :3], Y), batch_size=8), RuntimeError)
    assert "cannot be multiplied" in said  # torch's own words stay
    assert "first rows of the data: x is a tensor [8, 3]" in said
    said = told(lambda: fit(wrapped(), ({"x": X, "mask": X}, Y), batch_size=8), TypeError)
    assert "x['x'] is a tensor [8, 4], x['mask'] is a tensor [8, 4]" in said


def test_a_frame_given_to_fit_leads_to_from_dataframe() -> None:
    frame = pd.DataFrame(X.numpy(), columns=list("abcd"))
    assert "Data.from_dataframe(frame, target=...)" in told(lambda: fit(wrapped(), frame), TypeError)
    assert "from_dataframe" not in told(lambda: fit(wrapped(), X), TypeError)


def test_a_file_given_for_a_data_set_leads_to_data_of_ones_own() -> None:
    assert "Data.from_dataframe(pandas.read_csv(path), target=...)" in told(
        lambda: load_data("my/rows.csv"), ValueError
    )
    assert "from_dataframe" not in told(lambda: load_data("diabets"), ValueError)


def test_an_unknown_device_gets_the_names_of_known_ones() -> None:
    assert "'gpu'; give 'cpu', 'cuda'" in told(lambda: fit(wrapped(), (X, Y), device="gpu"), ValueError)
    fit(wrapped(), (X, Y), device=torch.device("cpu"), epochs=1, progress=False)


def test_a_tensor_as_a_setting_is_not_printed() -> None:
    said = told(lambda: vote.Wrapper(X), ValueError)
    assert said.endswith("not an object of type Tensor")
    assert told(lambda: vote.Wrapper("5"), ValueError).endswith("not '5'")


def test_one_wrapper_composed_twice_is_said_to_be() -> None:
    said = told(lambda: compose(vote.Wrapper(2), vote.Wrapper(3))(nn.Linear(4, 1)), ValueError)
    assert said.startswith("vote is composed 2 times")
    assert compose(vote.Wrapper(2), sculpt.Wrapper())(nn.Linear(4, 1)).methods == ("vote", "sculpt")


def test_a_number_as_a_place_gets_the_text_to_write() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 1))
    assert "at='0'" in told(lambda: vote.Wrapper(2)(model, at=0), ValueError)
    assert vote.Wrapper(2)(model, at="0")(X).shape == (40, 1)


def test_a_class_asked_for_risk_needs_an_instance() -> None:
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)

    built: Any = vote.Wrapper(2)(Net)
    assert "(...)(x, return_risk=True)" in told(lambda: built(X, return_risk=True), TypeError)
    assert "is a class" not in told(lambda: built(X), TypeError)  # the error of the constructor itself
    assert built()(X, return_risk=True)[1].shape == (40, 1)


def test_save_and_load_say_the_order_of_their_arguments(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert "save(wrapped, " in told(lambda: save(str(path), wrapped()), TypeError)
    assert not path.exists()
    save(wrapped(), path)
    assert "load(path, model); found a plain Linear" in told(lambda: load(nn.Linear(4, 1), path), TypeError)
    said = told(lambda: load(path), TypeError)
    assert said.endswith("a torch.nn.modules.linear.Linear; give load(path, model)")


def test_widgets_name_the_data_that_a_model_does_not_fit() -> None:
    data = Data.from_arrays(X[:, :3], Y)
    model = wrapped()
    with pytest.raises(ValueError, match=rf"can't be explored with {re.escape(data.name)}: .*cannot be multiplied"):
        Explorer(model, data)
    with pytest.raises(ValueError, match=r"fails on rows \[n, 3\]"):
        Comparison(workbench.unwrap(model), data, ["plain"]).start(block=True)
