"""Registry of data sets, read from registry.json.

To add a data set, add an entry under its name with these fields:

- `kind`: how it is read. "uci": one table with fixed splits; "images": four idx files as for MNIST; "scikit-learn": included in
  scikit-learn; "toy": computed by the function of its name in `workbench.data.toy`; any other: the function of this name in
  `workbench.data.published_images` or `workbench.data.published_tables`.
- `card`: `description`, `source`, `licence`, `citation`, and `notes`, a list of caveats.
- `task`: "regression" or "classification"; only for scikit-learn.
- `features` and `target`: columns as pairs [name, unit]; optional for features named by scikit-learn. `classes`: class names.
- `splits`: number of fixed splits; without it a split is a seed.
- `files`: path below the data folder -> sha256 of the content (for an .npz of its arrays, see `workbench.data.digests.digest`; for a .gz
  of the unpacked bytes; for a .tar.gz of the archive). `addresses`: base URLs of downloads, which end with a slash and are tried in order;
  empty if there is no download. `bytes`: sizes of the files on disk, in their order, if they can be downloaded.
  `remote`: name of a file below an address, or its full URL; null if there is no download of it.
- `columns`: column names of a file without header, or the names of the columns x and y. `until`: value of x from which rows are test rows.
- `loader`: function of `sklearn.datasets`, and `arguments` for it.

Data of another kind also need a function in `workbench.data.loading`.
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
    """Return the registry: name -> entry."""
    return json.loads(resources.files("workbench.data").joinpath("registry.json").read_text(encoding="utf-8"))


def resolve(name: str) -> str:
    """Return the registered name for a user's spelling ("Sine_Gap" is "sine-gap"). The error for a typo suggests a name.

    Raises:
        TypeError: name is not a string.
        ValueError: no data set has this name.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a data set must be a string; found {type(name).__name__}")
    normalized = name.strip().lower().replace("_", "-")
    if normalized not in entries():
        near = difflib.get_close_matches(normalized, entries(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        if set(name) & set("/\\.") and not near:
            hint += " Data of your own are read by workbench.data.Data, such as Data.from_dataframe(pandas.read_csv(path), target=...)."
        raise ValueError(f"there is no data set {name!r}{hint} Known names: {', '.join(entries())}")
    return normalized


def card(name: str) -> Card:
    """Return the card of a data set (description, source, licence, citation and notes) without loading the data.

    Example:
        >>> from workbench import data
        >>> data.card("fashion-mnist").licence
        'MIT, copyright 2017 Zalando SE'
    """
    fields = entries()[resolve(name)]["card"]
    return Card(**{**fields, "notes": tuple(fields.get("notes", ()))})
