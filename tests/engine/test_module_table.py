"""PyTorch's own table of modules (`module_db`) under every wrapper: compared with plain copies set by hand."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from helpers.conformance_table import WRAPPERS, is_due, pairs
from helpers.plain_copies import check_evaluation, check_training
from helpers.zoo import Case
from torch import nn
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_modules import ModuleInfo, module_db

from workbench.testing.models import seeded

pytestmark = pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored")
SAMPLES = 4  # of each module, spread over all that PyTorch has
INFOS = {info.name: info for info in module_db}


def build(info: ModuleInfo, sample: Any) -> nn.Module:
    """The module of a sample in training mode, without dropout, since random answers could not be compared."""
    args, kwargs = copy.deepcopy((sample.constructor_input.args, sample.constructor_input.kwargs))
    with seeded(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        model = info.module_cls(*args, **kwargs).double()
        if any(is_lazy(parameter) for parameter in model.parameters()):
            model(*sample.forward_input.args, **sample.forward_input.kwargs)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


@functools.cache
def cases_of(name: str) -> list[Case]:
    """Some of PyTorch's samples for a module as models; those without parameters have nothing to wrap and are left out."""
    info = INFOS[name]
    with seeded(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        samples = info.module_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=False)
    samples = [sample for sample in samples if [*build(info, sample).parameters()]]
    chosen = sorted({round(i * (len(samples) - 1) / (SAMPLES - 1)) for i in range(SAMPLES)})
    return [
        Case(
            f"{name}-{i}-{samples[i].desc}",
            functools.partial(build, info, samples[i]),
            lambda seed=0, rows=0, inputs=samples[i].forward_input: copy.deepcopy((inputs.args, inputs.kwargs)),
            frozenset(),
        )
        for i in chosen
        if samples
    ]


CONVOLUTIONS = [
    f"nn.{kind}{n}d" for kind in ("Conv", "ConvTranspose", "LazyConv", "LazyConvTranspose") for n in (1, 2, 3)
]
NORMS = [f"nn.{kind}" for kind in ("GroupNorm", "LayerNorm", "RMSNorm")]
NORMS += [f"nn.{kind}Norm{n}d" for kind in ("Batch", "Instance") for n in (1, 2, 3)]
CELLS = ["nn.RNNCell", "nn.GRUCell", "nn.LSTMCell"]
SINGLE = [
    "nn.Linear",
    "nn.Bilinear",
    "nn.Embedding",
    "nn.PReLU",
    "nn.LinearCrossEntropyLoss",
    "nn.RNN",
    "nn.GRU",
    "nn.LSTM",
]
NEO, NOISY = ("neo", "vote1_sculpt_neo"), ("sample_activations", "sample_sculpt")
ROWLESS = [
    "nn.RNN",
    "nn.GRU",
    "nn.Linear",
    "nn.Bilinear",
    "nn.Embedding",
    "nn.LayerNorm",
    "nn.RMSNorm",
    "nn.LinearCrossEntropyLoss",
]
# (wrappers, modules, error, words): what each of these wrappers refuses for at least one sample of each of these modules
REFUSED: list[tuple[tuple[str, ...], list[str], type[Exception], str]] = [
    (("vote_share2",), [*CONVOLUTIONS, *NORMS, *CELLS, *SINGLE], ValueError, "1 layers with weights"),
    (("sample_weights",), [*NORMS, "nn.PReLU"], ValueError, "no weights of two or more dimensions"),
    (("vote_prior",), [*NORMS, "nn.PReLU"], ValueError, "would differ between untrained models"),
    (("vote_prior",), ["nn.LinearCrossEntropyLoss"], ValueError, "the output is a number without dimensions"),
    # samples without an axis of rows, and whole numbers, which have no density
    (NEO, [*CONVOLUTIONS, *CELLS, *ROWLESS], ValueError, "found no layer whose input has one feature vector per row"),
    (NEO, ["nn.LinearCrossEntropyLoss", "nn.PReLU"], ValueError, "the model's output has no rows"),
    (NEO, ["nn.RNN", "nn.GRU", "nn.LSTM"], ValueError, "counts steps"),
    (NEO, ["nn.LayerNorm", "nn.RMSNorm"], ValueError, "needs at least 2 rows"),  # an empty batch
    (("augment",), ["nn.Embedding"], TypeError, "augment transforms floating-point inputs, but found none"),
    # the input of an embedding is a whole number; a norm after nothing has no activation, nor has a batch without rows
    (
        NOISY,
        ["nn.Embedding", "nn.LayerNorm", "nn.RMSNorm"],
        RuntimeError,
        "found no activation",
    ),
]


# laplace is of an nn.Linear at the end only
@pytest.mark.parametrize(
    ("name", "wrapper"), pairs(filter(cases_of, INFOS), (name for name in WRAPPERS if name != "laplace"), 6)
)
def test_wrapper_does_to_module_what_plain_copies_do_or_refuses_it(name: str, wrapper: str) -> None:
    wrapping = WRAPPERS[wrapper]
    expected = {words: error for wrappers, names, error, words in REFUSED if wrapper in wrappers and name in names}
    seen: set[str] = set()
    learns = wrapper != "neo" and not wrapping.kept
    checks = (check_evaluation, check_training) if learns else (check_evaluation,)
    cases, column = cases_of(name), [*WRAPPERS].index(wrapper)
    for row, case in enumerate(cases):
        # samples take the checks in turn, under the next wrapper the other way round; where some sample is to be refused, each makes all
        every = 1 if expected or len(cases) < len(checks) else len(checks)
        for check in [check for number, check in enumerate(checks) if is_due(row + number, column, every)]:
            try:
                check(case, wrapping)
            except tuple(expected.values()) as error:
                words = [words for words, kind in expected.items() if type(error) is kind and words in str(error)]
                if not words:
                    raise
                seen.update(words)
    assert seen == set(expected), "a refusal that is expected did not come"


@pytest.mark.parametrize("name", [name for name in INFOS if not cases_of(name)])
def test_module_without_parameters_is_refused_before_anything_changes(name: str) -> None:
    info = INFOS[name]
    with seeded():
        samples = info.module_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=False)
        model = info.module_cls(*samples[0].constructor_input.args, **samples[0].constructor_input.kwargs)
    for wrapping in WRAPPERS.values():
        with pytest.raises(ValueError, match="no floating-point parameters, so there is nothing to wrap"):
            wrapping.wrap(model)


def test_every_kind_of_layer_is_in_the_table() -> None:
    named = {name for _, names, _, _ in REFUSED for name in names}
    assert not [name for name in named - set(INFOS) if hasattr(nn, name.removeprefix("nn."))]  # torch 2.11 has fewer
    with_parameters = [name for name in INFOS if cases_of(name)]
    assert len(with_parameters) >= 33
    assert {"nn.Transformer", "nn.MultiheadAttention", "nn.LSTM", "nn.LazyConv2d", "nn.BatchNorm2d"} <= set(
        with_parameters
    )
