"""Random models under each wrapper, compared with plain copies; `workbench bench fuzz` has more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.random_models import PARTS, WRAPPERS, check, random_case, source

LENGTH, SEEDS, FAST = 6, 64, 6  # parts of a model, number of models, and how many of them the plain suite runs


@pytest.mark.parametrize(
    ("seed", "wrapper"),
    [
        pytest.param(seed, wrapper, marks=pytest.mark.slow if seed >= FAST else ())
        for seed in range(SEEDS)
        for wrapper in WRAPPERS[seed % 2 :: 2]
    ],
)
def test_random_models_get_the_numbers_of_plain_copies(seed: int, wrapper: str, tmp_path: Path) -> None:
    check(random_case(seed, LENGTH, tmp_path), wrapper)


def test_every_part_is_in_one_of_them() -> None:
    assert {name for seed in range(SEEDS) for name in source(seed, LENGTH)[0]} == {*PARTS}
