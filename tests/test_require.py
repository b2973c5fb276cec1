"""A package that is not installed is named with the extra that brings it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workbench.errors import require


def test_what_is_there_is_imported() -> None:
    assert require("collections.abc") is sys.modules["collections.abc"]


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.inside"])
def test_what_is_missing_is_named_with_its_extra(module: str) -> None:
    message = r"needs no_such_package, which is not installed: pip install 'risk-workbench\[dask\]'"
    with pytest.raises(ModuleNotFoundError, match=message) as error:
        require(module, "dask")
    assert error.value.name == "no_such_package"


def test_what_another_package_lacks_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_that_lacks_something.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        require("package_that_lacks_something")
