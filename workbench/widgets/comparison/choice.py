"""Choice of model and data of a comparison that was made without one of them, and the equivalent code."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.data import Data

from ..common.inputs import Model
from .offers import Offer, Variables, data_kind, data_offers, model_kind, model_offers
from .session import Contents
from .settings import Unwritable, candidates

TASKS = {"inferred from the column": None, "values": "regression", "classes": "classification", "counts": "counts"}
MISSING: Any = object()


@dataclass
class Chosen:
    """A model or data, and the code that refers to it."""

    value: Any
    code: str


class Choice:
    """The model and data given in code or chosen in the form; no comparison is built here.

    Args:
        model, data: given in code; None if still to be chosen.
        variables: returns the user's variables; called whenever offers are listed or taken.
        options: further arguments given to the comparison, by name.
        saved: contents of its session file; None without one.
    """

    def __init__(
        self, model: Any, data: Any, variables: Variables, options: Mapping[str, Any], saved: Contents | None
    ) -> None:
        self._variables, self._options, self.saved = variables, options, saved
        self.model = None if model is None else Chosen(model, self._code_of(model, "model"))
        self.data = None if data is None else Chosen(data, self._code_of(data, "data"))

    def given_in_code(self, model: Any, data: Any) -> tuple[Chosen | None, Chosen | None]:
        """Return model and data, replaced by those passed to `Comparison.choose`."""
        return (
            self.model if model is None else Chosen(model, self._code_of(model, "model")),
            self.data if data is None else Chosen(data, self._code_of(data, "data")),
        )

    def missing(self) -> str:
        """Return an error message that says what is still to be chosen, and how."""
        names = [name for name, chosen in (("data", self.data), ("model", self.model)) if chosen is None]
        return (
            f"no {' and no '.join(names)} chosen yet for this comparison: choose in its form, or by "
            f"choose({', '.join(f'{name}=...' for name in reversed(names))})"
        )

    # ---- offers
    def data_offers(self) -> list[Offer]:
        """Return the data that can be chosen now; those of the session file first."""
        variables = self._variables()
        return sorted(data_offers(variables), key=lambda offer: not self._has_data_of_session(offer, variables))

    def model_offers(self) -> list[Offer]:
        """Return the models that can be chosen now; those of the session file first."""
        variables = self._variables()
        return sorted(model_offers(variables), key=lambda offer: not self._has_model_of_session(offer, variables))

    def columns(self, offer: Offer) -> list[Any]:
        """Return the columns of an offered DataFrame."""
        return list(self._variable(offer, "data").columns)

    def of_session(self, data: Offer, model: Offer) -> bool:
        """Return whether the runs of the session file are of these data and this model."""
        variables = self._variables()
        return self._has_data_of_session(data, variables) and self._has_model_of_session(model, variables)

    def _has_data_of_session(self, offer: Offer, variables: Mapping[str, Any]) -> bool:
        if self.saved is None:
            return False
        if offer.kind == "name":
            return offer.code == repr(self.saved.data)
        value = variables.get(offer.code)
        return isinstance(value, Data) and value.name == self.saved.data

    def _has_model_of_session(self, offer: Offer, variables: Mapping[str, Any]) -> bool:
        if self.saved is None:
            return False
        ready = offer.kind == "ready"
        return self.saved.model == (ast.literal_eval(offer.code) if ready else str(Model(variables[offer.code])))

    # ---- taking an offer
    def take_data(self, offer: Offer, target: Any, task: str | None) -> Chosen:
        """Return the data of an offer as they are now; for a data set by name, its name.

        Raises:
            TypeError, ValueError: if the variable is gone or has another type now, or the DataFrame has no such targets.
        """
        if offer.kind == "name":
            return Chosen(ast.literal_eval(offer.code), offer.code)
        value = self._variable(offer, "data")
        if offer.kind != "DataFrame":
            return Chosen(value, offer.code)
        split = self._options.get("split", 0)
        return Chosen(Data.from_dataframe(value, target, task=task, split=split), self.frame_code(offer, target, task))

    def frame_code(self, offer: Offer, target: Any, task: str | None) -> str:
        """Return the code that makes a Data from an offered DataFrame."""
        options = {"task": task, "split": self._options.get("split")}
        arguments = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        return f"Data.from_dataframe({', '.join([offer.code, repr(target), *arguments])})"

    def take_model(self, offer: Offer) -> Chosen:
        """Return the model of an offer, or the function or class that makes it, as it is now; it is not called.

        Raises:
            ValueError: if the variable is gone or has another type now.
        """
        if offer.kind == "ready":
            return Chosen(ast.literal_eval(offer.code), offer.code)
        return Chosen(self._variable(offer, "model"), offer.code)

    def _variable(self, offer: Offer, what: str) -> Any:
        variables = self._variables()
        value = variables.get(offer.code, MISSING)
        home = str(variables.get("__name__", "__main__"))
        kind = data_kind(value) if what == "data" else model_kind(value, home)
        if kind != offer.kind:
            now = "is gone" if value is MISSING else f"is a {type(value).__name__} now"
            raise ValueError(f"{what}: the variable {offer.code}, which was a {offer.kind}, {now}; choose another one")
        return value

    def _code_of(self, value: Any, otherwise: str) -> str:
        """Return the code for a value: a string literal, the name of a variable, or else `otherwise`."""
        if isinstance(value, str):
            return repr(value)
        named = (name for name, known in self._variables().items() if known is value and not name.startswith("_"))
        return next(named, otherwise)

    # ---- code
    def line(self, model: str, data: str) -> str:
        """Return the code that makes the same comparison, with the imports it needs besides `Comparison`."""
        imports = {"from workbench.data import Data"} if data.startswith("Data.") else set()
        arguments = [model, data]
        for name, value in self._options.items():
            if name == "wrappers":
                arguments.append(self._wrappers(value, imports))
            else:
                arguments.append(
                    f"{name}={os.fspath(value)!r}" if isinstance(value, os.PathLike) else f"{name}={value!r}"
                )
        return "\n".join([*sorted(imports), f"Comparison({', '.join(arguments)})"])

    def _wrappers(self, wrappers: Any, imports: set[str]) -> str:
        if isinstance(wrappers, str) or (
            isinstance(wrappers, list | tuple) and all(isinstance(wrapper, str) for wrapper in wrappers)
        ):
            return repr(wrappers)
        needed: set[str] = set()
        try:
            sources = {candidate.name: candidate.source(needed) for candidate in candidates(wrappers)}
        except Unwritable:
            return self._code_of(wrappers, "wrappers")
        imports |= needed
        return f"{{{', '.join(f'{name!r}: {source}' for name, source in sources.items())}}}"
