"""Model cards of wrapped models, which describe their risks to readers of the folder."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...version import __version__
from ..additions import extra
from .training_data import card_section

_MARK = "<!-- written by workbench; without this line the card is yours, and stays as it is -->"


def write_card(wrapped: Any, folder: Path, around: Sequence[dict[str, Any]] = ()) -> None:
    """Write README.md into the folder of a wrapped model, unless there is one that workbench has not written.

    Args:
        wrapped: the wrapped model.
        folder: folder in which it was saved.
        around: metadata of the modules around it, outermost first.
    """
    path = folder / "README.md"
    if path.is_file() and _MARK not in path.read_text(encoding="utf-8"):
        return
    import huggingface_hub as hub  # a dependency of transformers

    source = str(getattr(getattr(wrapped, "config", None), "_name_or_path", "") or "")
    base = source if source and not Path(source).exists() and source.count("/") < 2 else None
    record = wrapped._workbench
    tags = ["workbench", "uncertainty", *(method.name for method in record.methods)]
    data = hub.ModelCardData(library_name="workbench", base_model=base, tags=tags)
    hub.ModelCard(f"---\n{data.to_yaml()}\n---\n{_MARK}\n\n{_text(wrapped, base, around)}").save(path)


def _text(wrapped: Any, base: str | None, around: Sequence[dict[str, Any]]) -> str:
    record = wrapped._workbench
    name = type(wrapped)._plain_class.__name__
    rows = ["| wrapper | settings |", "|---|---|"]
    for method in record.methods:
        settings = ", ".join(f"`{key}={value!r}`" for key, value in method.settings().items())
        rows.append(f"| {method.name} | {settings or 'none'} |")
    units = extra(wrapped, "scaling")
    facts = [
        f"- Base model: {f'[{base}](https://huggingface.co/{base})' if base else 'not known (built or loaded in the program that saved it)'}",
        f"- Outputs: {f'`{record.output!r}`' if record.output is not None else 'values; the risk is a standard deviation'}",
        f"- Units: {'standardized inside; predictions and risks are in those of the data' if units is not None else 'those of the model'}",
        f"- Calibration: {' of '.join(map(_constructor_call, around)) or 'none in this folder'}",
        f"- Voters: {len(super(type(wrapped), wrapped).voters()) if any(method.members for method in record.methods) else 1}",
    ]
    abstains = bool(around) and around[0]["class"] == "SelectivePredictor"
    call = (
        "prediction, kept, risk = model(**inputs)"
        if abstains
        else "prediction, risk = model(**inputs, return_risk=True)"
    )
    return f"""# {name} that says when not to trust it

This {name} was wrapped by workbench (`risk-workbench`): beside its prediction it gives the risk of that prediction.

{chr(10).join(rows)}

{chr(10).join(facts)}

## Data

{card_section(record, around)}

## Load it

```python
import workbench

model = workbench.from_pretrained("path of this folder")
{call}
```

Predictions and risks are then those of the saved model to the last bit, on the same machine with the same versions:
workbench {__version__}, torch {torch.__version__}, transformers {metadata.version("transformers")}, Python {platform.python_version()}.
"""


def _constructor_call(entry: dict[str, Any]) -> str:
    """Format the constructor call of a module around a model."""
    arguments = [f"{name}={value!r}" for name, value in entry["arguments"].items()]
    return f"`{entry['class']}({', '.join([*arguments, *(f'{name}=...' for name in entry['functions'])])})`"


__all__ = ["write_card"]
