"""Registry of data sets: what registry.json says of each.

Adding a data set is adding an entry, from its name to:

- `kind`: how it is read. "uci": one table with fixed splits; "images": four idx files, those of MNIST; "scikit-learn": it comes with
  scikit-learn; "toy": computed by the function of its name in `workbench.data.toy`; any other: the function of this name in
  `workbench.data.published_images` or `workbench.data.published_tables`.
- `card`: `description`, `source`, `licence`, `citation`, and `notes`, a list of what to beware of.
- `task`: "regression" or "classification"; only for scikit-learn.
- `features` and `target`: columns as pairs [name, unit]; scikit-learn may name its features itself. `classes`: names of the classes.
- `splits`: how many fixed splits there are; without it a split is a seed.
- `files`: path below the data folder -> sha256 of the content (of the arrays of an .npz as `workbench.data.data_set.digest` counts it, of the
  unpacked bytes of a .gz but an archive), and `addresses`: where they are downloaded from, one after another until one answers; each ends with a
  slash; none where nobody offers these files. `bytes`: what the files take on the disk, in their order, where they can be downloaded.
  `remote`: name of a file below an address, or its own whole address; null where nobody offers it.
- `columns`: of the file, where it does not name them, or those that are x and y. `until`: the value of x from which rows are test rows.
- `loader`: the function of `sklearn.datasets`, and `arguments` for it.

Data of another kind need a function in `workbench.data.loading` as well.
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib import resources
from typing import Any

from workbench.data.columns import Card


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The whole registry, by name."""
    return json.loads(resources.files("workbench.data").joinpath("registry.json").read_text(encoding="utf-8"))


def resolve(name: str) -> str:
    """Find the registered name for what the user wrote ("Sine_Gap" is "sine-gap"); a typo gets a suggestion.

    Raises:
        TypeError: name is not a string.
        ValueError: no data set has this name.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a data set must be a string; found {type(name).__name__}")
    known = name.strip().lower().replace("_", "-")
    if known not in entries():
        near = difflib.get_close_matches(known, entries(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no data set {name!r}{hint} Known names: {', '.join(entries())}")
    return known


def card(name: str) -> Card:
    """Description, source, licence, citation and notes of a data set, without loading it.

    Example:
        >>> from workbench import data
        >>> data.card("fashion-mnist").licence
        'MIT, copyright 2017 Zalando SE'
    """
    fields = entries()[resolve(name)]["card"]
    return Card(**{**fields, "notes": tuple(fields.get("notes", ()))})
