"""Every wrapper on every model of the zoo: compared with plain models whose tensors are set by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conformance import DEVICE, check_builtin, checks_due, checks_of_cell, placed
from helpers.conformance_table import EXPECTED_REFUSALS, REFUSED_BY, WRAPPERS, pairs
from helpers.zoo import CASES


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# what is registered in another order than it runs is told, and its numbers are right all the same
@pytest.mark.filterwarnings("ignore:.*for the last layers of:workbench.errors.WorkbenchWarning")
@pytest.mark.parametrize(("case", "wrapper"), pairs(CASES, WRAPPERS, 6 if DEVICE else len(WRAPPERS)))
def test_wrapper_does_to_model_what_plain_models_do_or_refuses_it(
    case: str, wrapper: str, request: pytest.FixtureRequest
) -> None:
    check_builtin(placed(CASES[case]), WRAPPERS[wrapper], whole=request.node.get_closest_marker("slow") is None)


def test_every_model_and_every_wrapper_meets_every_check_that_applies() -> None:
    cells = [(case, wrapper) for case in CASES for wrapper in WRAPPERS]
    owed = {cell: set(checks_of_cell(CASES[cell[0]], WRAPPERS[cell[1]])) for cell in cells}
    due = {cell: set(checks_due().get(cell, ())) for cell in cells}
    assert all(due[cell] <= owed[cell] for cell in cells)
    assert [cell for cell in cells if owed[cell] and not due[cell]] == []
    for axis in (0, 1):
        assert {(cell[axis], check) for cell in cells for check in due[cell]} == {
            (cell[axis], check) for cell in cells for check in owed[cell]
        }


def test_every_refusal_names_a_case_and_a_wrapper() -> None:
    assert {case for case, _ in EXPECTED_REFUSALS}.union(*REFUSED_BY.values()) <= set(CASES)
    assert {wrapper for _, wrapper in EXPECTED_REFUSALS} <= set(WRAPPERS)
