"""Docstrings as the site shows them: the section that is called "Example:" here as code, formulas as pictures."""

from __future__ import annotations

import re
from typing import Any

import griffe

from workbench.notebook.formulas import formula


class Docstrings(griffe.Extension):
    """Change a docstring when it has been read."""

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_: Any) -> None:
        if obj.is_alias or obj.docstring is None:
            return
        text = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
        obj.docstring.value = re.sub(r":math:`([^`]+)`", lambda match: formula(match[1]), text)
