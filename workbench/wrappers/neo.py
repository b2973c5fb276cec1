"""Neo: a signature of the features of the training data tells input that the model has never seen (vacuitic risk)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.plan import Bank, Intervention, Plan
from ..engine.sites import Sites
from ..engine.tree import tensors, tree_map
from ..errors import NotFittedError
from ..method import Method, evaluating
from ..table import engine_of, extra, extras, table_of
from ..wrapping import Wrapper as _Wrapper
from .densities import Density, Flow, Gaussian, pool

if TYPE_CHECKING:
    from ..table import Table

DENSITIES = {"gaussian": Gaussian, "flow": Flow}
MOST_SITES = 8
MOST_ROWS = 20_000


class Wrapper(_Wrapper):
    """Vacuitic risk from the density of the model's own features (Lee et al. 2018; Mukhoti et al. 2023).

    The features are what enters the model's layers with weights, its input included, pooled to one vector a row. They are detached and taken
    in evaluation mode: training the signature changes neither the model nor its predictions. The risk is one number a row, standardised on
    the training data (mean 0, standard deviation 1).

    Learn the signature in closed form, `wrapped.fit(loader)`, or without labels by gradient: `wrapped(x, return_risk=True)[1].mean()` is a
    negative log likelihood, a sound loss whose minimum is the density of the training features.

    Args:
        layers: names of modules whose inputs are the features; by default up to eight layers, evenly spread.
        density: "gaussian" (one joint Gaussian with shrinkage, Ledoit & Wolf 2004), "flow" (a RealNVP that starts as that Gaussian, Dinh et
            al. 2017), or a `Density`.
        common: output, strategy, verbose, example, purity, chunk; see `workbench.Wrapper`.

    Example:
        >>> import torch
        >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> model = Wrapper()(torch.nn.Linear(2, 1)).eval().fit(x)
        >>> risk = model(torch.tensor([[0.0, 0.0], [9.0, 9.0]]), return_risk=True)[1]
        >>> bool(risk[1] > risk[0] + 5)
        True
    """

    def __init__(self, layers: Any = None, density: Any = "gaussian", **common: Any) -> None:
        super().__init__(**common)
        if isinstance(layers, str):
            layers = [layers]
        if not isinstance(density, Density) and density not in DENSITIES:
            raise ValueError(f"density must be one of {', '.join(DENSITIES)} or a Density, not {density!r}")
        self.layers, self.density = None if layers is None else tuple(layers), density

    def make(self) -> list[Method]:
        return [Neo(self.layers, self.density)]


class Neo(Method):
    """The method on one model; see `Wrapper`."""

    name, kind, order, needs_fit, own_pass = "neo", "vacuitic", 40, True, True

    def __init__(self, layers: tuple[str, ...] | None, density: str | Density) -> None:
        self.layers, self.density = layers, density
        self._sites: list[str] | None = None  # chosen at the first batch

    def settings(self) -> dict[str, Any]:
        name = self.density if isinstance(self.density, str) else type(self.density).__name__
        return {"layers": None if self.layers is None else list(self.layers), "density": name}

    def attach(self, table: Table) -> None:
        paths = {path for path, _ in table.root.named_modules() if "@" not in path}
        for layer in self.layers or ():
            if layer not in paths:
                import difflib

                near = difflib.get_close_matches(layer, sorted(paths), 3)
                raise ValueError(
                    f"layers: the model has no module {layer!r}; {'nearest: ' + ', '.join(near) if near else 'see named_modules()'}"
                )
        import copy

        density = DENSITIES[self.density]() if isinstance(self.density, str) else copy.deepcopy(self.density)
        like = next((p for p in table.root.parameters()), None)
        extras(table.root)._modules["density"] = density.to(like.device if like is not None else None)
        if not isinstance(self.density, str):
            self.density = type(self.density).__name__.lower()

    def model(self, wrapped: Any) -> Density:
        """The density, a sub-module of the wrapped object."""
        return extra(wrapped, "density")

    def check_ready(self, wrapped: Any) -> None:
        """Raise before anything runs if there is no signature yet."""
        if not wrapped.training and not self.model(wrapped).fitted:
            raise NotFittedError(
                "neo has seen no training data yet: call wrapped.fit(loader) with the training inputs, or train it in training mode with "
                "wrapped(x, return_risk=True)[1].mean() as the loss"
            )

    def measure(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """The model's prediction, and the risk of every row."""
        y, features = self._features(wrapped, args, kwargs)
        return y, self.model(wrapped)(features)

    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Learn the signature of the training inputs in closed form (the flow: by a short training of its own)."""
        from tqdm.auto import tqdm

        from ..wrapped import inputs_of

        collected: list[list[Tensor]] = []
        rows = 0
        like = next(wrapped.parameters())
        with torch.no_grad():
            for args, kwargs in tqdm(inputs_of(inputs), desc="signature", delay=2, leave=False):
                args, kwargs = tree_map(
                    lambda leaf: leaf.to(like.device) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
                )
                if (scaling := extra(wrapped, "scaling")) is not None:
                    args = scaling.inputs(args)
                collected.append(self._features(wrapped, args, kwargs)[1])
                rows += collected[-1][0].shape[0]
                if rows >= MOST_ROWS:
                    break
        if not collected:
            raise ValueError("fit got no inputs; give the training inputs as a tensor or a loader")
        density = self.model(wrapped)
        with torch.enable_grad():
            density.fit([torch.cat(parts) for parts in zip(*collected, strict=True)])

    def _features(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        table = table_of(wrapped)
        tap = _Tap(self, table)
        plan = Plan((), wrapped._workbench.rules, Bank(table.get), (tap,), keep_state=False)
        with evaluating(wrapped):
            _, results = engine_of(wrapped).run(plan, args, kwargs)
        outputs = [t for t in tensors(results[0].output) if t.dim()]
        rows = outputs[0].shape[0] if outputs else None
        if len(outputs) > 1 and len(outputs) in {t.shape[0] for t in tensors((args, kwargs)) if t.dim()}:
            rows = len(outputs)  # a part for each row
        if rows is None:
            raise ValueError("neo gives one risk a row, but the model's output has no rows (a single number)")
        pooled = {name: _pooled(feature, rows, table, name) for name, feature in results[0].taps.items()}
        features = {name: feature for name, feature in pooled.items() if feature is not None}
        if self._sites is None:
            self._sites = self._choose(list(features))
        missing = [name for name in self._sites if name not in features]
        if missing:
            raise RuntimeError(
                f"neo: {missing[0]} gave no feature of {rows} rows in this call, as it did in the first; choose layers= that always run"
            )
        return results[0].output, [features[name] for name in self._sites]

    def _choose(self, names: list[str]) -> list[str]:
        if self.layers is not None:
            names = [n for n in names if any(n == layer or n.startswith(f"{layer}.") for layer in self.layers)]
        if not names:
            raise ValueError("neo found no layer whose input has one feature vector a row; name other layers=")
        if self.layers is None and len(names) > MOST_SITES:
            names = [names[round(i * (len(names) - 1) / (MOST_SITES - 1))] for i in range(MOST_SITES)]
        return names


class _Tap(Intervention):
    def __init__(self, method: Neo, table: Table) -> None:
        self.method, self.table, self.taps = method, table, {}

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        self.trail = ()

        def at_site(names: frozenset[str], leaves: list[Any], live: list[int], raw: list[int]) -> list[Any]:
            self.trail = (*self.trail, (tuple(sorted(names)), tuple(live), tuple(raw)))
            if any(isinstance(t, Tensor) and t.dtype == torch.int64 and t.dim() == 1 for t in leaves):
                return leaves  # packed sequences: the rows of the data are not those of the batch
            weights = sorted(names, key=lambda name: (not name.endswith("weight"), name))
            for i in sorted([*live, *raw])[:1]:
                feature = leaves[i].detach()
                self.taps.setdefault(
                    weights[0], torch.view_as_real(feature).flatten(-2) if feature.is_complex() else feature
                )
            return leaves

        weights = any(self.table.value(name).dim() >= 2 for name in self.table.parameters())
        return Sites(parameters, state, inputs, at_site, contractions=weights)


def _pooled(feature: Tensor, rows: int, table: Table, name: str) -> Tensor | None:
    """One vector a row, None where the feature has no axis of rows."""
    slot = table.record.slots.get(name)
    convolution = slot is not None and table.value(name).dim() == 3 and feature.dim() == 3
    if feature.dim() >= 2 and feature.shape[0] == rows:
        return pool(feature, rows, channel_dim=1 if convolution else None)
    if feature.dim() >= 3 and feature.shape[1] == rows:
        return pool(feature, rows, row_dim=1)
    if feature.dim() >= 1 and feature.shape[0] and feature.shape[0] % rows == 0 and feature.dim() == 2:
        return pool(feature.reshape(rows, -1, feature.shape[-1]), rows)  # tokens or patches of a row, one after another
    return None


__all__ = ["Neo", "Wrapper"]
