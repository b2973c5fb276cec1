"""Every test of Keras models starts at the same random numbers."""

from __future__ import annotations

import pytest
from helpers.keras_models import k


@pytest.fixture(autouse=True)
def _seeded_keras() -> None:
    k.utils.set_random_seed(0)
