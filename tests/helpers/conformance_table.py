"""The table of the conformance tests: the wrappers (models are those of the zoo), and expected refusals with their messages."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch

from helpers.zoo import Case
from workbench import augment, compose, laplace, neo, sample, sculpt, snapshot, swag, vote
from workbench.engine.run import OutputShapeError
from workbench.errors import WorkbenchWarning
from workbench.testing.checks import COMPOSED_ON
from workbench.testing.models import seeded
from workbench.testing.trial import Trial

VOTERS, SAMPLES, ROWS, NOISE = 3, 3, 6, 0.3
PRIOR = 2.0  # scale of the prior of vote
PRIOR_PRECISION, DATA_NOISE = 2.0, 0.5  # settings of laplace


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """A column of the table: a wrapper and what it does to a model.

    Args:
        name: Key in `WRAPPERS`.
        make: `make(strategy, noise)` returns the wrapper; `noise` is its amount of noise if it samples.
        kinds: The risks that it measures.
        voters: Number of voters.
        where: Where it puts noise, "" for no noise.
        kept: Whether the voters' weights are stored in addition to the trained ones.
        prior: Scale of the untrained models that are added to the voters.
        heads: Number of risk heads; None means one if it measures aleatoric risk, and none otherwise.
    """

    name: str
    make: Callable[[str, float], Any]
    kinds: tuple[str, ...]
    voters: int = 1
    where: str = ""
    heads: int | None = None
    kept: bool = False
    prior: float = 0.0

    def wrap(self, model: Any, strategy: str = "auto", noise: float = 0.0, seed: int = 1) -> Any:
        """Return the wrapped model; the seed determines the initial values of voters and heads."""
        with seeded(seed):
            return self.make(strategy, noise)(model)

    def trial(self, case: Case, noise: float = NOISE) -> Trial:
        """Return this wrapper on one model, in the form that `workbench.testing` checks."""
        return Trial(case, lambda: self.make("auto", noise))

    @property
    def samples(self) -> int:
        return SAMPLES if self.where else 1

    @property
    def members(self) -> str:
        """The axis of the voters."""
        return self.name if self.kept else "vote"

    @property
    def variances(self) -> tuple[str, ...]:
        """The risks that are standard deviations."""
        kinds = tuple(kind for kind in self.kinds if kind != "vacuitic")
        return (*kinds, "total") if len(kinds) > 1 else kinds

    @property
    def single(self) -> str:
        """The single risk, which is returned as a tensor rather than a `Risk`; "" if there are several."""
        return self.kinds[0] if len(self.kinds) == 1 else ""


def _voting(strategy: str, noise: float, share: Any = None, prior: float | None = None) -> Any:
    return vote.Wrapper(VOTERS, share=share, prior=prior, strategy=strategy)


def _sampling(where: str, strategy: str, noise: float) -> Any:
    distribution = sample.Bernoulli(noise) if where == "activations" else sample.Normal(noise)
    return sample.Wrapper(SAMPLES, distribution, where=where, strategy=strategy)


def _augmenting(strategy: str, noise: float) -> Any:
    return augment.Wrapper(
        [functools.partial(torch.mul, other=1 + noise * k) for k in range(SAMPLES)], strategy=strategy
    )


def _sculpting(strategy: str, noise: float) -> Any:
    return sculpt.Wrapper(strategy=strategy)


class _Scattered:
    """Mixin for swag and snapshot with weights as if collected in a training; the first are those of the model."""

    def attach(self, table: Any) -> None:
        super().attach(table)  # type: ignore[misc]
        self._scatter(table)

    def extend(self, table: Any, slots: list[str]) -> None:
        super().extend(table, slots)  # type: ignore[misc]
        self._scatter(table)

    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Do nothing: the weights are already collected."""

    def latest(self, table: Any, name: str) -> torch.Tensor:
        """Return the model's weights: it is not trained after the sets were made up."""
        return table.get(name)

    def _scatter(self: Any, table: Any) -> None:
        for name in self.names(table, [*self._parameters, *self._buffers]):
            rows = table.get(f"{name}@{self.name}")
            if rows.is_floating_point() or rows.is_complex():
                rows[1:] *= 1 + 0.1 * torch.rand_like(rows[1:])
        self.flag(table, "ready").fill_(True)


class _Snapshot(_Scattered, snapshot.Snapshot):
    pass


class _Swag(_Scattered, swag.Swag):
    pass


class _Snapshots(snapshot.Wrapper):
    def make(self) -> list[Any]:
        return [_Snapshot(self)]


class _Swags(swag.Wrapper):
    def make(self) -> list[Any]:
        return [_Swag(self)]


EPISTEMIC, ALEATORIC = ("epistemic",), ("aleatoric",)
WRAPPERS = {
    wrapping.name: wrapping
    for wrapping in [
        Wrapping("vote", _voting, EPISTEMIC, VOTERS),
        Wrapping("snapshot", lambda s, n: _Snapshots(VOTERS, strategy=s), EPISTEMIC, VOTERS, kept=True),
        Wrapping("swag", lambda s, n: _Swags(VOTERS, 2, 0.5, 0.1, strategy=s), EPISTEMIC, VOTERS, kept=True),
        Wrapping("vote_rank1", lambda s, n: _voting(s, n, "rank1"), EPISTEMIC, VOTERS),
        Wrapping("vote_share1", lambda s, n: _voting(s, n, 1), EPISTEMIC, VOTERS),
        Wrapping("vote_prior", lambda s, n: _voting(s, n, prior=PRIOR), EPISTEMIC, VOTERS, prior=PRIOR),
        Wrapping("vote_share2", lambda s, n: _voting(s, n, 2), EPISTEMIC, VOTERS),
        Wrapping("sculpt", _sculpting, ALEATORIC),
        Wrapping(
            "sculpt_evidential",
            lambda s, n: sculpt.Wrapper(sculpt.NormalInverseGamma, strategy=s),
            ALEATORIC + EPISTEMIC,
            heads=3,
        ),
        Wrapping(
            "vote_sculpt_quantiles",
            lambda s, n: compose(_voting(s, n), sculpt.Wrapper(sculpt.Quantiles((0.1, 0.9)), strategy=s)),
            ALEATORIC + EPISTEMIC,
            VOTERS,
            heads=2,
        ),
        Wrapping("sample_activations", lambda s, n: _sampling("activations", s, n), EPISTEMIC, where="activations"),
        Wrapping("sample_weights", lambda s, n: _sampling("weights", s, n), EPISTEMIC, where="weights"),
        Wrapping("sample_inputs", lambda s, n: _sampling("inputs", s, n), EPISTEMIC, where="inputs"),
        Wrapping("augment", _augmenting, EPISTEMIC, where="transforms"),
        Wrapping("neo", lambda s, n: neo.Wrapper(strategy=s), ("vacuitic",)),
        Wrapping("laplace", lambda s, n: laplace.Wrapper(None, PRIOR_PRECISION, DATA_NOISE, strategy=s), EPISTEMIC),
        Wrapping(
            "vote_sculpt",
            lambda s, n: compose(_sculpting(s, n), _voting(s, n)),
            ALEATORIC + EPISTEMIC,
            VOTERS,
        ),
        Wrapping(
            "sample_sculpt",
            lambda s, n: compose(_sampling("activations", s, n), _sculpting(s, n)),
            ALEATORIC + EPISTEMIC,
            where="activations",
        ),
        Wrapping(
            "vote1_sculpt_neo",
            lambda s, n: compose(_voting(s, n, 1), neo.Wrapper(strategy=s), _sculpting(s, n)),
            (*ALEATORIC, *EPISTEMIC, "vacuitic"),
            VOTERS,
        ),
    ]
}


class Refusal(NamedTuple):
    """An error that a wrapper must raise for a model: its type, and a part of its message."""

    error: type[Exception]
    words: str


EXPECTED_REFUSALS: dict[tuple[str, str], Refusal] = {
    **{("scripted", name): Refusal(TypeError, "is scripted (torch.jit)") for name in WRAPPERS},
    ("bilinear", "vote_share2"): Refusal(ValueError, "share=2, but Bilinear has 1 layers with weights"),
    ("parameter_dict", "vote_share2"): Refusal(ValueError, "share=2, but ParameterDict has 1 layers with weights"),
    ("tied_autoencoder", "vote_share2"): Refusal(ValueError, "share=2, but TiedAutoencoder has 1 layers with weights"),
    **{("generator_out", name): Refusal(TypeError, "generator") for name in WRAPPERS},
    **{
        (name, "augment"): Refusal(TypeError, "augment transforms floating-point inputs, but found none")
        for name in ("embedding_bag", "tied")
    },
    **{
        ("generator_out", name): Refusal(RuntimeError, "sample found no activation")
        for name, wrapping in WRAPPERS.items()
        if wrapping.where == "activations"
    },
    ("generator_out", "neo"): Refusal(ValueError, "neo gives one risk per row"),
    ("generator_out", "vote1_sculpt_neo"): Refusal(ValueError, "neo gives one risk per row"),
    **{
        ("scalar_output", name): Refusal(ValueError, "the model's output has no rows")
        for name, wrapping in WRAPPERS.items()
        if "vacuitic" in wrapping.kinds
    },
    **{
        (case, "laplace"): Refusal(ValueError, words)
        for words, cases in {
            "laplace needs a last layer that is an nn.Linear": (
                *("bilinear", "conv1d_series", "conv_transpose", "parameter_dict", "paramlist_einsum", "unet"),
            ),
            "depends on it in another way": (
                *(
                    "autograd_in_forward",
                    "closure",
                    "closure_two",
                    "moe_topk",
                    "name_clash",
                    "namedtuple_out",
                    "ragged_out",
                ),
                *("routed_by_input", "scalar_output", "sdpa", "tied", "tied_autoencoder"),
            ),
            "runs once per call": ("fill_zeros", "generator_out", "vmap_inside"),
            "is not added in the call that uses its weight": ("custom_autograd_weight",),
        }.items()
        for case in cases
    },
    **{
        (case, "vote_prior"): Refusal(ValueError, "changes attributes of the model")
        for case in ("cached_property", "counter_attr", "grown_list", "cached_tensor_attr", "cache_dict", "shared_list")
    },
    ("int_and_float_out", "vote_prior"): Refusal(ValueError, "is of torch.int64"),
    ("scalar_output", "vote_prior"): Refusal(ValueError, "is a number without dimensions"),
    **{
        (case, "vote_prior"): Refusal(WorkbenchWarning, "in all untrained models of prior=")
        for case in ("constant_leaf", "passthrough_out")
    },
    ("nonzero_shape", "sample_inputs"): Refusal(OutputShapeError, "different shapes in different branches"),
}

_VMAP = {
    "autograd_in_forward": "requires_grad_",
    "bool_mask": "dynamic shape",
    "cached_tensor_attr": "keeps a tensor of its branch",
    "checkpoint": "",  # it recomputes, which vmap does not support before torch 2.13
    "custom_autograd": "setup_context",
    "custom_autograd_weight": "setup_context",
    "data_if": "data-dependent control flow",
    "ema_inplace": "broadcast shape",
    "fill_zeros": "inplace arithmetic",
    "global_assign": "global variables",
    "gnn_scatter": "index_add_",
    "gru_packed": "",  # names gru or .item(), whichever runs first
    "input_mutation": "writes into its inputs",
    "item_loop": ".item()",
    "lstm": "lstm",
    "mha_module": "two vmaps",
    "moe_topk": "dynamic shape",
    "nonpersistent_ema": "broadcast shape",
    "numpy_print": "data pointer",
    "numpy_randomness": "random numbers",
    "out_kwarg": "add.out",
    "packed_seq": "",  # names lstm or .item(), whichever runs first
    "routed_by_input": ".item()",
    "sdpa": "two vmaps",
    "shared_list": "keeps a tensor of its branch",
    "spectral_norm": "div.out",
    "transformer": "two vmaps",
}
_RESCUED = {"fill_zeros", "gnn_scatter", "lstm", "mha_module", "out_kwarg", "sdpa", "spectral_norm", "transformer"}
_RECOMPUTED = {"checkpoint": "noise on activations cannot be drawn again"}
REFUSED_BY = {  # check -> case -> part of the message; not refused if the obstacle lies in the shared trunk
    **dict.fromkeys(("training", "loss", "bfloat16", "autocast"), _RECOMPUTED),
    "with vote": dict.fromkeys(COMPOSED_ON, "both model the distribution of the weights"),
    "vmap": _VMAP,
    "rescue": {case: words for case, words in _VMAP.items() if case not in _RESCUED},
    "replay": {
        "autograd_in_forward": "differentiates in its forward pass",
        "checkpoint": "recomputes",
        "custom_autograd_weight": "other gradients",
        "dropout": "draws random numbers",
        "fill_zeros": "writes into it in place",
        "input_mutation": "writes into its inputs",
        "numpy_print": ".numpy",
        "numpy_randomness": "",  # not the same in every pass, or each branch needs its own
    },
}
# check -> parts of the messages of refusals on a GPU only, where recurrent layers gather their weights in one piece of memory
REFUSED_ON_GPU = {
    "vmap": ("no rule for fused attention", "Cannot access data pointer"),
    "replay": ("reaches into a tensor's memory",),
}
# wrappers left out of a check do not differ from these in what it covers; replay needs branches that share a trunk
_WHOLE = tuple(name for name in WRAPPERS if name not in ("vote_share2", "vote_sculpt", "sample_sculpt"))
RUN_BY = {
    **dict.fromkeys(("untouched", "branches", "loss", "plain state", "deepcopy", "pickle"), _WHOLE),
    **dict.fromkeys(("float64", "bfloat16", "autocast"), _WHOLE),
    "vmap": tuple(name for name in WRAPPERS if name != "augment"),  # augment runs its branches one after another
    "rescue": ("vote", "vote_share1", "sculpt", "sample_weights", "vote1_sculpt_neo"),
    "replay": ("vote_share1", "sculpt", "vote1_sculpt_neo"),
}


EXHAUSTIVE = os.environ.get("WORKBENCH_EXHAUSTIVE") == "1"  # run everything instead of rotating


def is_due(row: int, column: int, every: int) -> bool:
    """Return whether to run this cell: one in `every` cells of each row and column, all in an exhaustive run."""
    return EXHAUSTIVE or (row + column) % every == 0


def pairs(rows: Iterable[str], columns: Iterable[str], every: int) -> list[Any]:
    """Return all pairs as parameters, with one in `every` for the default suite and the others marked slow; every row and column is covered."""
    columns = list(columns)
    return [
        pytest.param(row, column, id=f"{row}-{column}", marks=[pytest.mark.slow] * ((i + j) % every > 0))
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
