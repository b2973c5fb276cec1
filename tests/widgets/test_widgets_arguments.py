"""What a `Comparison` is given: data, models and wrappers in each form, and what is refused at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.widget_cases import draw, rows, small

from workbench import compose, sample, sculpt, vote
from workbench.data.reader import data_of
from workbench.widgets import Comparison


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, rows()), TypeError, "model: found int"),
        ((..., rows()), TypeError, r"model: found \.\.\."),
        ((vote.Wrapper()(small()), rows()), TypeError, "wrapped already"),
        ((lambda: 3, rows()), TypeError, "returned int"),
        ((small(4), rows()), ValueError, r"fails on rows \[n, 3\]"),
        ((small(3, 2), rows()), ValueError, r"gives \[2, 2\] .* must return \[2, 1\]"),
        ((small, "concret"), ValueError, "did you mean 'concrete'"),
        ((small, 3), TypeError, "data: found int"),
        ((small, (draw(30, 3), draw(29, 1))), ValueError, "the same number of rows"),
        ((small, (draw(10, 3), draw(10, 1))), ValueError, "found 10 rows"),
        ((small, (draw(30, 3), draw(30, 2))), ValueError, r"must return \[2, 2\]"),
        ((small, rows(), ["nothing"]), ValueError, "no wrapper 'nothing'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        Comparison(*arguments)


@pytest.mark.parametrize(
    "options", [{"epochs": 0}, {"lr": 0.0}, {"weight_decay": -1.0}, {"seed": -1}, {"output": "odds"}]
)
def test_wrong_settings_are_refused_at_once(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Comparison(small, rows(), **options)


def test_pairs_become_data():
    data = data_of((np.arange(50.0), np.arange(50) % 3))
    assert (data.task, data.input_shape, data.n_outputs) == ("classification", (1,), 3)
    assert len(data.train) == 40
    x = torch.cat([data.train.x, data.test.x]).flatten()
    assert sorted(x.tolist()) == list(range(50))
    assert (data_of((draw(40, 2), draw(40))).train.y.shape) == (32, 1)


@pytest.mark.slow
def test_wrappers_given_by_name_keep_their_names_and_settings():
    wrappers = {"five": vote.Wrapper(5), "both": compose(sculpt.Wrapper(), sample.Wrapper(3))}
    comparison = Comparison(small, rows(), wrappers, epochs=1).start(block=True)
    assert list(comparison.models) == ["plain", "five", "both"]
    assert len(comparison.models["five"].voters()) == 5
    assert comparison.models["both"].methods == ("sample", "sculpt")


@pytest.mark.slow
def test_wrappers_are_given_as_texts_with_arguments():
    texts = ["vote(n_voters=5)", "vote(n_voters=2) + sculpt(StudentT(df=4))"]
    comparison = Comparison(small, rows(), texts, epochs=1).start(block=True)
    assert list(comparison.models) == ["plain", *texts]
    assert [len(comparison.models[text].voters()) for text in texts] == [5, 2]
