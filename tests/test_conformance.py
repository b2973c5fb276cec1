"""One table: every wrapper on every model of the zoo, each held against plain models whose tensors are set by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conformance import check_builtin
from helpers.conformance_table import EXPECTED_REFUSALS, REFUSED_BY, WRAPPERS, pairs
from helpers.zoo import CASES


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("case", "wrapper"), pairs(CASES, WRAPPERS, 12))
def test_wrapper_does_to_model_what_plain_models_do_or_refuses_it(case: str, wrapper: str) -> None:
    check_builtin(CASES[case], WRAPPERS[wrapper])


def test_every_refusal_names_a_case_and_a_wrapper() -> None:
    assert {case for case, _ in EXPECTED_REFUSALS}.union(*REFUSED_BY.values()) <= set(CASES)
    assert {wrapper for _, wrapper in EXPECTED_REFUSALS} <= set(WRAPPERS)
