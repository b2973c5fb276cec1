"""Random models under each wrapper, compared with plain copies; `workbench bench fuzz` has more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.random_models import KINDS, WRAPPERS, check, dealt, parts, random_case

LENGTH, FAST = 6, 2  # parts of a model, and how many models of a kind the plain suite runs
SEEDS = {"vectors": 33, "images": 9, "sequences": 7}  # number of models


@pytest.mark.parametrize(
    ("kind", "seed", "wrapper"),
    [
        pytest.param(kind, seed, wrapper, marks=pytest.mark.slow if seed >= FAST else ())
        for kind in KINDS
        for seed in range(SEEDS[kind])
        for wrapper in WRAPPERS[seed % 2 :: 2]
    ],
)
def test_random_models_get_the_numbers_of_plain_copies(kind: str, seed: int, wrapper: str, tmp_path: Path) -> None:
    check(random_case(kind, seed, LENGTH, tmp_path), wrapper)


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_is_in_one_of_them(kind: str) -> None:
    assert {name for seed in range(SEEDS[kind]) for name in dealt(kind, seed, LENGTH)} == {*parts(kind)}
