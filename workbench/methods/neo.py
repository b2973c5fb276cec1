"""Neo: vacuitic risk, how unlike the training data an input is, from a density (the signature) of the model's features."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..console import progress_bar
from ..core.additions import add_extra, extra
from ..core.method import Method, evaluating
from ..core.outputs.options import form_of
from ..core.ownership import table_of
from ..core.prior import run_with_prior
from ..core.refusals import nearest
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from ..engine.effects.random import values_unavailable
from ..engine.plan import Bank, Plan
from ..engine.tree import map_tensors, tensors
from ..errors import NotFittedError
from . import layer_rows, position_risk, row_risk
from .densities import DENSITIES, Density, DensityName
from .densities.padding import kept_steps
from .densities.positions import Positions
from .feature_tap import FeatureMap, FeatureTap
from .position_risk import MAX_IMAGES, Layout, has_positions, layout_of
from .spread_batches import spread

if TYPE_CHECKING:
    from ..core.ownership import Table

Take = Callable[[str, FeatureMap], Tensor]
MAX_SITES = 5  # layers whose inputs are used by default
# densities that run the same operations for all inputs, so that a call can be recorded
_TRACEABLE = ("signature", "gaussian")


class Wrapper(_Wrapper):
    """Vacuitic risk from the density of the model's own features (Lee et al. 2018; Ren et al. 2021).

    The features are the inputs of the model's layers with weights, the model's own input included, pooled to one vector per row: means over a
    2x2 grid of a map, or over the two halves of a sequence, without padding steps (known from an attention or padding mask, lengths, or a
    padding token of the embedding). They are detached and computed in evaluation mode: training the signature changes neither the model nor
    its predictions. The risk is one number per row, standardized to mean 0 and standard deviation 1 on held-out rows of the training data.

    On a map of classes, `output=Logits(dim=1)`, and with per="position" on other maps, tokens and volumes, there is a risk for each position:
    each layer has a density of its input at a single position, whose scores are computed at the layer's resolution, interpolated to the
    positions of the output and added up. It is fitted by `wrapped.fit` only, on 64 positions, drawn with a fixed seed, of each of at most 512
    rows. per="image" gives the mean over the 5 % riskiest positions of each row, standardized in the same way.

    Learn the signature in closed form, `wrapped.fit(loader)`, or by gradient without labels: `wrapped(x, return_risk=True)[1].mean()` is a
    negative log likelihood, a proper loss whose minimum is the density of the training features. The default, "gaussian" and "flow" can be
    trained by gradient; the others raise an error.

    For a classifier, the default also uses each row's distance to the classes that the model predicts. The model counts as a classifier if it
    is wrapped with output="logits" or "probs", or if `fit` (also `workbench.fit`) finds class numbers, int64 [rows], as targets; its number of
    outputs does not matter, since several outputs may be several targets. `classes` overrides this.

    Example:
        >>> import torch
        >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> model = Wrapper()(torch.nn.Linear(2, 1)).eval().fit(x)
        >>> risk = model(torch.tensor([[0.0, 0.0], [9.0, 9.0]]), return_risk=True)[1]
        >>> bool(risk[1] > risk[0] + 5)
        True
    """

    layers: str | Sequence[str] | None = setting(
        default=None,
        help="names of modules whose inputs are the features; by default up to five layers, evenly spread.",
    )
    density: DensityName | Density = setting(
        default="signature",
        classes=tuple(DENSITIES.values()),
        help='of the features of all layers: "signature" (a joint Gaussian, plus relative Mahalanobis distances for classifiers), "gaussian" '
        '(only the Gaussian, with shrinkage, Ledoit & Wolf 2004) or "flow" (a RealNVP that starts as that Gaussian, Dinh et al. 2017); of the '
        'last layer\'s features: "classwise" (one Gaussian per class, Mukhoti et al. 2023), "mahalanobis" (Lee et al. 2018) and "relative" (Ren '
        'et al. 2021) distances to the classes, or "knn" (distance to the 50th neighbour, Sun et al. 2022); of the class scores: "msp" '
        '(Hendrycks & Gimpel 2017), "max_logit" (Hendrycks et al. 2022), "energy" (Liu et al. 2020) or "gen" (Liu et al. 2023); of both: "vim" '
        '(Wang et al. 2022), "fdbd" (Liu & Qin 2024) or "nnguide" (Park et al. 2023); the energy of modified features: "react" (Sun et al. '
        '2021), "ash" (Djurisic et al. 2023) or "scale" (Xu et al. 2024); "auto": energy, react and the signature, combined with a small '
        "network that separates training inputs from outliers made of them; or a `Density`.",
    )
    per: Literal["row", "position", "image"] | None = setting(
        default=None,
        help='"row": one number per row, from pooled features; "position": one per position of the output, in the shape of its other risks; '
        '"image": one number per row, from its riskiest positions. None: "position" if output= says which dimension holds classes, otherwise '
        '"row".',
    )
    classes: bool | None = setting(
        default=None,
        help="whether the (first) output [rows, classes] holds class scores, from which the predicted class is taken; None: see above.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = DENSITIES[self.density] if isinstance(self.density, str) else type(self.density)
        if self.classes is False and kind.needs_logits:
            raise ValueError(
                f"neo: density={kind.__name__} works on class scores, and classes=False says that there are none: leave classes out, or choose "
                "another density"
            )

    def make(self) -> list[Method]:
        return [Neo(self)]


class Neo(Method):
    """Method behind `Wrapper`, for one model."""

    name, kind, order, needs_fit, own_pass = "neo", "vacuitic", 40, True, True
    beside_layers = ("density",)
    detections = (
        "it gives one number per row, and boxes are not rows of the input; wrap the backbone alone, neo.Wrapper()(model, "
        'at="backbone"), which gives one number per image'
    )

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper)
        self.layers: tuple[str, ...] | None = self.wrapper.layers
        self._sites: list[str] | None = None  # chosen at the first batch
        self._met: frozenset[str] = frozenset()  # parameters of the calls that the chosen layers take part in
        self.layout: Layout | None = None  # of the positions, known from the first batch
        self._rows_at = (0, 0)  # index of the input tensor that holds the rows, and its dimension of rows
        self._time_first: dict[str, bool] = {}  # whether a layer's input is [t, rows, ...], as far as shapes have shown
        self._turns: dict[str, int] = {}  # calls of a layer in each pass before the one whose input is a feature
        self._is_order_known = True  # whether the order of rows in the chosen layers was checked, which takes two

    def settings(self) -> dict[str, Any]:
        density = self.wrapper.density
        return {
            "layers": None if self.layers is None else list(self.layers),
            "density": density if isinstance(density, str) else _name_of(density),
            "per": self.wrapper.per,
        }

    def arguments(self, wrapped: Any) -> dict[str, Any]:
        density = self.model(wrapped)
        return {
            **super().arguments(wrapped),
            "density": density.template if isinstance(density, Positions) else density,
        }

    def notes(self) -> dict[str, Any]:
        return {
            "sites": self._sites,
            "layout": self.layout,
            "time_first": [name for name in self.sites if self._time_first.get(name)],
            "turns": self._turns,
            "is_order_known": self._is_order_known,
        }

    def recall(self, wrapped: Any, notes: dict[str, Any], stored: dict[str, Tensor], moved: Callable[[], bool]) -> None:
        """Restore a saved signature with the weights it was fitted on, or discard one whose weights were replaced."""
        if any(key.startswith("density.") for key in stored) and self.wrapper.per is None:
            # files written before neo supported positions have one number per row
            self._set_density(wrapped, "density.moments" in stored)
        density = self.model(wrapped)
        sizes = {f"density.{key}": value.shape for key, value in density.state_dict().items()}
        saved_sizes = {key: value.shape for key, value in stored.items() if key.startswith("density.")}
        if saved_sizes:
            self._sites, self._met = notes.get("sites"), frozenset()
            self._time_first = dict.fromkeys(notes.get("time_first", ()), True)  # files of earlier versions lack these
            self._turns, self._is_order_known = dict(notes.get("turns", {})), bool(notes.get("is_order_known", True))
            layout = notes.get("layout")
            self.layout = None if layout is None else (int(layout[0]), bool(layout[1]))
        if saved_sizes != sizes if saved_sizes else density.fitted and moved():
            density.forget()

    def attach(self, table: Table) -> None:
        paths = [path for path, _ in table.root.named_modules() if "@" not in path]
        for layer in self.layers or ():
            if layer not in paths:
                raise ValueError(f"layers: the model has no module {layer!r}{nearest(layer, paths)}")
        chosen = self.wrapper.density
        density = DENSITIES[chosen]() if isinstance(chosen, str) else copy.deepcopy(chosen)
        form = form_of(table.record.output)
        if not density.takes_probs and form == "probs":
            raise ValueError(
                f'density={type(density).__name__} works on logits, and output="probs" says that the model returns probabilities; let the model '
                'return logits, with output="logits"'
            )
        if not density.by_position and self._by_position(table.record.output):
            raise ValueError(
                f"density={type(density).__name__} works on one vector per row before the last layer, and the risk of positions is requested "
                f"(per={self.wrapper.per!r}, output={form}); choose another density, such as mahalanobis, knn or energy"
            )
        like = next((p for p in table.root.parameters()), None)
        add_extra(table.root, "density", density.to(like.device if like is not None else None))
        self._set_density(table.root, self._by_position(table.record.output))
        # the density itself is a submodule now, so the setting need only name it
        if (name := _name_of(density)) in DENSITIES:
            self.wrapper = replace(self.wrapper, density=name)

    def model(self, wrapped: Any) -> Any:
        """Return the density (of rows or of positions), a submodule of the wrapped model."""
        return extra(wrapped, "density")

    @property
    def sites(self) -> list[str]:
        """Names of the parameters whose layers' inputs are the features."""
        return self._sites or []

    @property
    def rows_first(self) -> bool:
        """Whether rows are in the first dimension of the input."""
        return self._rows_at[1] == 0

    def repeats(self, training: bool) -> bool:
        return self.wrapper.density in _TRACEABLE and self.layout is None

    def _by_position(self, output: Any) -> bool:
        per = self.wrapper.per
        return has_positions(output) if per is None else per != "row"

    def _set_density(self, root: Any, positions: bool) -> None:
        """Install a density of positions or of rows, unless the present one is of that kind."""
        density = self.model(root)
        if isinstance(density, Positions) != positions:
            replacement = density.template if isinstance(density, Positions) else _position_density(density)
            add_extra(root, "density", replacement)
            self.forget_sites()

    def forget_sites(self) -> None:
        """Let the next batch choose the layers."""
        self._sites, self._met, self._turns, self.layout = None, frozenset(), {}, None
        self._is_order_known = True

    def check_ready(self, wrapped: Any) -> None:
        """Raise NotFittedError, before anything runs, if there is no signature yet."""
        if isinstance(self.model(wrapped), Positions) and not self.model(wrapped).fitted:
            raise NotFittedError(
                "neo has seen no training data yet: call wrapped.fit(loader) with the training inputs. The risk of positions cannot be learned "
                'by gradient; per="row" can'
            )
        if not wrapped.training and not self.model(wrapped).fitted:
            raise NotFittedError(
                "neo has seen no training data yet: call wrapped.fit(loader) with the training inputs, or train it in training mode with "
                "wrapped(x, return_risk=True)[1].mean() as the loss"
            )

    def measure(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the model's prediction, and the risk of every row or position."""
        if isinstance(self.model(wrapped), Positions):
            return position_risk.judge(self, wrapped, args, kwargs, self.wrapper.per == "image")
        return row_risk.judge(self, wrapped, args, kwargs)

    def check(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if (scaling := extra(wrapped, "scaling")) is not None:
            args, kwargs = scaling.inputs(args, kwargs)
        trial = copy.copy(self)  # what it notes of its first batch is for `fit` to note
        trial._time_first = self._time_first.copy()
        with evaluating(wrapped):
            if not isinstance(self.model(wrapped), Positions):
                row_risk.check(trial, wrapped, args, kwargs)
            elif not position_risk.check(trial, wrapped, args, kwargs):
                self._refuse_no_positions()

    def check_targets(self, wrapped: Any, prediction: Any, y: Any) -> None:
        if not isinstance(self.model(wrapped), Positions):
            row_risk.check_targets(self, wrapped, y)

    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Learn the signature of the training inputs in closed form (a flow: by a short training)."""
        if self._by_position(wrapped._workbench.output):
            self._set_density(wrapped, True)
            inputs, inputs_of_rows = itertools.tee(inputs) if isinstance(inputs, Iterator) else (inputs, inputs)
            with torch.no_grad():
                batches = ((args, kwargs) for args, kwargs, _ in self._batches(wrapped, inputs, MAX_IMAGES))
                if position_risk.learn(self, wrapped, batches):
                    return
            self._refuse_no_positions()
            self._set_density(wrapped, False)
            inputs = inputs_of_rows
        row_risk.learn(self, wrapped, self._batches(wrapped, inputs, row_risk.MAX_ROWS))

    def _refuse_no_positions(self) -> None:
        if self.wrapper.per is not None:
            raise ValueError(
                f"neo: per={self.wrapper.per!r}, but the output has no positions in common with the features of the last layer; use "
                'per="row", or say which dimension holds the classes, output=Logits(dim=1)'
            )

    def _batches(self, wrapped: Any, inputs: Any, max_rows: int) -> Iterator[tuple[tuple, dict[str, Any], Any]]:
        """Iterate over the model's positional and keyword inputs, on its device and in its units, and the targets."""
        like = next(wrapped.parameters())
        for args, kwargs, target in progress_bar(
            spread(inputs, wrapped, max_rows), desc="signature", delay=2, leave=False
        ):
            args, kwargs = map_tensors(lambda t: t.to(like.device), (args, kwargs))
            if (scaling := extra(wrapped, "scaling")) is not None:
                args, kwargs = scaling.inputs(args, kwargs)
            yield args, kwargs, target

    def features(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], take: Take | None = None
    ) -> tuple[Any, int, list[Tensor], FeatureTap]:
        """Run the model and collect the features of the chosen layers.

        Args:
            wrapped: the wrapped model.
            args, kwargs: inputs of the model.
            take: function of a layer's name and its feature map; None pools one vector per row.

        Returns:
            The model's output, its number of rows, the feature of each chosen layer ([rows, d], or what `take` returned), and the tap.
        """
        leaves = tensors((args, kwargs))
        rows = self._expected_rows(leaves)
        known = self._time_first.copy()
        output, tap = self.run(wrapped, args, kwargs, rows, take)
        n_rows = _n_rows(output, leaves)
        if n_rows != rows:
            # features were pooled during the pass, for the expected number of rows: run again with the right one
            self._time_first = known
            places = [(i, dim) for i, t in enumerate(leaves) for dim, size in enumerate(t.shape) if size == n_rows]
            self._rows_at = next(iter(places), self._rows_at)
            output, tap = self.run(wrapped, args, kwargs, n_rows, take)
        if not self.model(wrapped).needs_features:
            return output, n_rows, [], tap
        is_first = self._sites is None
        if is_first and layer_rows.settle_axes(self, wrapped, args, kwargs, n_rows, tap):
            output, tap = self.run(wrapped, args, kwargs, n_rows, take)
        if self._sites is None and take is None:
            wrong = layer_rows.misplaced_layers(self, wrapped, args, kwargs, n_rows, tap, tap.by_step)
            if by_step := tap.by_step - wrong:
                raise ValueError(
                    f"neo: the first dimension of the output, {n_rows}, counts steps, as that of the inputs of {min(by_step)}, of a layer with "
                    "batch_first=False; a risk for each row needs the rows there. Return the output with rows first, output.transpose(0, 1), or "
                    'set batch_first=True if the inputs have rows first; per="position" gives a risk for each step of each row'
                )
            chosen = self._choose([name for name in tap.taps if name not in wrong], tap.same)
            self._sites = chosen[-1:] if self.model(wrapped).last_only else chosen
        elif self._sites is None:
            self.layout = layout_of(wrapped._workbench.output, output, tap)
            if self.layout is None:
                return output, n_rows, [], tap
            wrong = layer_rows.misplaced_layers(
                self, wrapped, args, kwargs, n_rows, self.run(wrapped, args, kwargs, n_rows, None)[1]
            )
            usable = [name for name in tap.taps if tap.layouts[name][0] == self.layout[0] and name not in wrong]
            self._sites = self._choose(usable, tap.same)
        if is_first:
            self._turns = {name: tap.turns[name] for name in self._sites if tap.turns.get(name)}
            self._is_order_known = n_rows > 1
        missing = [name for name in self._sites if name not in tap.taps]
        if missing:
            raise RuntimeError(
                f"neo: {missing[0]} had no input with {n_rows} rows in this call, unlike in the first; choose layers= that always run"
            )
        if not self._is_order_known and n_rows > 1 and not values_unavailable():
            layer_rows.check_order(self, wrapped, args, kwargs, n_rows)
        if not self._met:
            met = (names for names in tap.calls if not names.isdisjoint(self._sites))
            # a parameter that meets only parameters, such as a learned query, would count as data if it were left out
            self._met = frozenset().union(tap.without_data, *met)
        return output, n_rows, [tap.taps[name] for name in self._sites], tap

    def _expected_rows(self, leaves: list[Tensor]) -> int | None:
        i, dim = self._rows_at
        return leaves[i].shape[dim] if i < len(leaves) and dim < leaves[i].dim() else None

    def run(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], rows: int | None, take: Take | None
    ) -> tuple[Any, FeatureTap]:
        """Run the model once in evaluation mode, with a tap on its features."""
        table = table_of(wrapped)
        method = getattr(type(wrapped)._plain_class, wrapped._workbench.method)
        keep = kept_steps(wrapped, functools.partial(method, wrapped), args, kwargs)
        tap = FeatureTap(self, table, rows, keep, take)
        taps = (tap,) if self.model(wrapped).needs_features else ()
        plan = Plan((), wrapped._workbench.rules, Bank(table.get), taps, keep_state=False)
        with evaluating(wrapped):
            branched, results = run_with_prior(wrapped, plan, args, kwargs)
        output = results[0].output if extra(wrapped, "prior") is None else branched.rebuild(branched.leaves)
        return output, tap

    def _choose(self, usable: list[str], same_inputs: dict[str, str]) -> list[str]:
        """Choose among layers with usable inputs; of those with the same input, given as pairs (other, first), the first."""
        same = {name: first for name, first in same_inputs.items() if name in usable}
        names = [name for name in usable if name not in same]
        if self.layers is not None:
            candidates = [*names, *same]
            chosen = [n for n in candidates if any(n == layer or n.startswith(f"{layer}.") for layer in self.layers)]
            names = list(dict.fromkeys(same.get(name, name) for name in chosen))
        if not names:
            raise ValueError(
                "neo found no layer whose input has one feature vector per row, in the order of the rows; name other layers="
            )
        if self.layers is None and len(names) > MAX_SITES:
            names = [names[round(i * (len(names) - 1) / (MAX_SITES - 1))] for i in range(MAX_SITES)]
        return names


def _n_rows(output: Any, inputs: list[Tensor]) -> int:
    """Return the number of rows of an output: the length of its first tensor, or of a list with one output per row."""
    outputs = [t for t in tensors(output) if t.dim()]
    if not outputs:
        raise ValueError("neo gives one risk per row, but the model's output has no rows (a single number)")
    is_list = isinstance(output, list | tuple)
    is_list_of_rows = is_list and len(outputs) > 1 and len(outputs) in {t.shape[0] for t in inputs if t.dim()}
    return len(outputs) if is_list_of_rows else len(outputs[0])


def _name_of(density: Density) -> str:
    """Return the name of a density in the settings."""
    return next((name for name, kind in DENSITIES.items() if kind is type(density)), type(density).__name__.lower())


def _position_density(density: Density) -> Positions:
    template = copy.deepcopy(density)
    template.forget()
    return Positions(template).to(density.centre.device)


__all__ = ["Neo", "Wrapper"]
