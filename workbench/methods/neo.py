"""Neo: a signature of the features of the training data tells input that the model has never seen (vacuitic risk)."""

from __future__ import annotations

import copy
import difflib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.method import Method, evaluating
from ..core.outputs.options import form_of, has_classes
from ..core.ownership import add_extra, extra, table_of
from ..core.prior import run_with_prior
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from ..engine.plan import Bank, Plan
from ..engine.tree import tensors, tree_map
from ..errors import NotFittedError
from .class_rows import class_numbers, class_scores, last_layer, measurements
from .densities import DENSITIES, Density, DensityName
from .densities.padding import kept_steps
from .densities.positions import Positions
from .feature_tap import FeatureMap, FeatureTap
from .made_outliers import gathered, unlike
from .position_risk import MOST_IMAGES, Layout, has_positions, judge, layout_of, learn
from .spread_batches import spread

if TYPE_CHECKING:
    from ..core.ownership import Table

Take = Callable[[str, FeatureMap], Tensor]
MOST_SITES = 5
MOST_ROWS = 20_000
MOST_OUTLIERS = 10_000
_PLAIN = ("signature", "gaussian")  # densities whose risk is the same operations for all rows


class Wrapper(_Wrapper):
    """Vacuitic risk from the density of the model's own features (Lee et al. 2018; Ren et al. 2021).

    The features are what enters the model's layers with weights, its input included, pooled to one vector a row: the means over a 2x2 grid
    of a map, over the two halves of a sequence, without the steps that an attention or padding mask, lengths or a padding token of the
    embedding tell to be padding. They are detached and taken in evaluation mode: training the signature changes neither the model nor its
    predictions. The risk is one number a row, standardised to mean 0 and standard deviation 1 on held-out rows of the training data.

    On a map of classes, `output=Logits(dim=1)`, and with per="position" on other maps, tokens and volumes there is a risk for each position:
    each layer has a density of what enters it at a single position, its scores are computed at the layer's resolution, interpolated to the
    positions of the output and added. It is fitted on 64 positions, drawn with a fixed seed, of each of at most 512 rows, by `wrapped.fit`
    only. per="image" gives the mean over the 5 % riskiest positions of each row, standardised likewise.

    Learn the signature in closed form, `wrapped.fit(loader)`, or without labels by gradient: `wrapped(x, return_risk=True)[1].mean()` is a
    negative log likelihood, a sound loss whose minimum is the density of the training features. The default, "gaussian" and "flow" can be
    trained so; the others say that they cannot.

    The default asks of a classifier for each row's distance to the classes, too, which are those that the model predicts. The model counts as
    a classifier if it is wrapped with output="logits" or "probs", or if `fit` (`workbench.fit` as well) meets class numbers int64 [rows] as
    targets; not for its number of outputs, since several outputs may be several targets. `classes` decides it by hand.

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
        help='"signature" (a joint Gaussian, plus relative Mahalanobis distances for classifiers), "gaussian" (that one alone, with shrinkage, '
        'Ledoit & Wolf 2004), "flow" (a RealNVP that starts as that Gaussian, Dinh et al. 2017), "classwise" (one Gaussian a class before the '
        'last layer, Mukhoti et al. 2023), "mahalanobis" (Lee et al. 2018) and "relative" (Ren et al. 2021) distances to the classes there, '
        '"knn" (distance to the 50th neighbour there, Sun et al. 2022); of the class scores "msp" (Hendrycks & Gimpel 2017), "max_logit" '
        '(Hendrycks et al. 2022), "energy" (Liu et al. 2020) or "gen" (Liu et al. 2023); of both "vim" (Wang et al. 2022), "fdbd" (Liu & Qin '
        '2024) or "nnguide" (Park et al. 2023); the energy of changed features, "react" (Sun et al. 2021), "ash" (Djurisic et al. 2023) or '
        '"scale" (Xu et al. 2024); "auto", energy, react and the signature beside a small network that tells training inputs from outliers '
        "made of them; or a `Density`.",
    )
    per: Literal["row", "position", "image"] | None = setting(
        default=None,
        help='"row": one number a row, of pooled features; "position": one at each position of the output, shaped as its other risks; "image": '
        "one number a row, of its riskiest positions. None: position where output= says which dimension holds classes, else row.",
    )
    classes: bool | None = setting(
        default=None,
        help="whether the (first) output [rows, classes] holds class scores, from which the predicted class is taken; None: as said above.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = DENSITIES[self.density] if isinstance(self.density, str) else type(self.density)
        if self.classes is False and kind.needs_logits:
            raise ValueError(
                f"density={kind.__name__} works on class scores, and classes=False says that there are none"
            )

    def make(self) -> list[Method]:
        return [Neo(self)]


class Neo(Method):
    """The method on one model; see `Wrapper`."""

    name, kind, order, needs_fit, own_pass = "neo", "vacuitic", 40, True, True
    beside_layers = ("density",)
    detections = (
        "it gives one number for each row, and boxes are no rows of the input; wrap the backbone alone, neo.Wrapper()(model, "
        'at="backbone"), which gives one for each image'
    )

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper)
        self.layers: tuple[str, ...] | None = self.wrapper.layers
        self._sites: list[str] | None = None  # chosen at the first batch
        self._met: frozenset[str] = frozenset()  # the parameters that a call with a chosen layer involves
        self.layout: Layout | None = None  # of positions, as the first batch tells
        self._rows_at = (0, 0)  # which tensor of the input has the rows, in which dimension
        self._time_first: dict[str, bool] = {}  # layers whose input is [t, rows, ...], as far as shapes have told

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
        return {"sites": self._sites, "layout": self.layout}

    def recall(self, wrapped: Any, notes: dict[str, Any], stored: dict[str, Tensor], moved: Callable[[], bool]) -> None:
        """The signature travels with the weights that it was made with."""
        if any(key.startswith("density.") for key in stored) and self.wrapper.per is None:
            # files of before neo knew positions have one number a row
            self._place(wrapped, "density.moments" in stored)
        density = self.model(wrapped)
        sizes = {f"density.{key}": value.shape for key, value in density.state_dict().items()}
        saved_sizes = {key: value.shape for key, value in stored.items() if key.startswith("density.")}
        if saved_sizes:
            self._sites, self._met = notes.get("sites"), frozenset()
            layout = notes.get("layout")
            self.layout = None if layout is None else (int(layout[0]), bool(layout[1]))
        if saved_sizes != sizes if saved_sizes else density.fitted and moved():
            density.forget()

    def attach(self, table: Table) -> None:
        paths = {path for path, _ in table.root.named_modules() if "@" not in path}
        for layer in self.layers or ():
            if layer not in paths:
                near = difflib.get_close_matches(layer, sorted(paths), 3)
                raise ValueError(
                    f"layers: the model has no module {layer!r}; {'nearest: ' + ', '.join(near) if near else 'see named_modules()'}"
                )
        chosen = self.wrapper.density
        density = DENSITIES[chosen]() if isinstance(chosen, str) else copy.deepcopy(chosen)
        form = form_of(table.record.output)
        if not density.takes_probs and form == "probs":
            raise ValueError(
                f'density={type(density).__name__} works on logits, and output="probs" says that the model gives probabilities; let the model '
                'return logits, with output="logits"'
            )
        if not density.by_position and self._by_position(table.record.output):
            raise ValueError(
                f"density={type(density).__name__} works on one vector a row before the last layer, and the risk of positions is asked for "
                f"(per={self.wrapper.per!r}, output={form}); choose another density, mahalanobis, knn or energy for example"
            )
        like = next((p for p in table.root.parameters()), None)
        add_extra(table.root, "density", density.to(like.device if like is not None else None))
        self._place(table.root, self._by_position(table.record.output))
        if (name := _name_of(density)) in DENSITIES:  # the density itself is a sub-module now
            self.wrapper = replace(self.wrapper, density=name)

    def model(self, wrapped: Any) -> Any:
        """The density, or that of positions, a sub-module of the wrapped object."""
        return extra(wrapped, "density")

    @property
    def sites(self) -> list[str]:
        """The parameters of the layers whose inputs are the features."""
        return self._sites or []

    @property
    def rows_first(self) -> bool:
        """Whether rows are in the first dimension of the input."""
        return self._rows_at[1] == 0

    def repeats(self, training: bool) -> bool:
        return self.wrapper.density in _PLAIN and self.layout is None

    def _by_position(self, output: Any) -> bool:
        per = self.wrapper.per
        return has_positions(output) if per is None else per != "row"

    def _place(self, root: Any, positions: bool) -> None:
        """Have a density of rows or of positions, as it is now if it is one already."""
        density = self.model(root)
        if isinstance(density, Positions) != positions:
            new = density.template if isinstance(density, Positions) else _of_positions(density)
            add_extra(root, "density", new)
            self._sites, self._met, self.layout = None, frozenset(), None

    def check_ready(self, wrapped: Any) -> None:
        """Raise before anything runs if there is no signature yet."""
        if isinstance(self.model(wrapped), Positions) and not self.model(wrapped).fitted:
            raise NotFittedError(
                "neo has seen no training data yet: call wrapped.fit(loader) with the training inputs. The risk of positions is learned so, and "
                'not by gradient; per="row" can be'
            )
        if not wrapped.training and not self.model(wrapped).fitted:
            raise NotFittedError(
                "neo has seen no training data yet: call wrapped.fit(loader) with the training inputs, or train it in training mode with "
                "wrapped(x, return_risk=True)[1].mean() as the loss"
            )

    def measure(self, wrapped: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The model's prediction, and the risk of every row or position."""
        density = self.model(wrapped)
        if isinstance(density, Positions):
            return judge(self, wrapped, args, kwargs, self.wrapper.per == "image")
        y, rows, features, _ = self.features(wrapped, args, kwargs)
        return y, density(features, class_scores(wrapped, y, rows) if density.wants_logits else None)

    def fit(self, wrapped: Any, inputs: Any) -> None:
        """Learn the signature of the training inputs in closed form (the flow: by a short training of its own)."""
        if self._by_position(wrapped._workbench.output):
            self._place(wrapped, True)
            inputs, again = itertools.tee(inputs) if isinstance(inputs, Iterator) else (inputs, inputs)
            with torch.no_grad():
                batches = ((args, kwargs) for args, kwargs, _ in self._batches(wrapped, inputs, MOST_IMAGES))
                if learn(self, wrapped, batches):
                    return
            if self.wrapper.per is not None:
                raise ValueError(
                    f"neo: per={self.wrapper.per!r}, and the output has no positions that the features of the last layer have as well; use "
                    'per="row", or say which dimension holds the classes, output=Logits(dim=1)'
                )
            self._place(wrapped, False)
            inputs = again
        self._fit_rows(wrapped, inputs)

    def _batches(self, wrapped: Any, inputs: Any, most: int) -> Iterator[tuple[tuple, dict[str, Any], Any]]:
        """Inputs as the model takes them, and targets."""
        from tqdm.auto import tqdm

        like = next(wrapped.parameters())
        for args, kwargs, target in tqdm(spread(inputs, wrapped, most), desc="signature", delay=2, leave=False):
            args, kwargs = tree_map(
                lambda leaf: leaf.to(like.device) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
            if (scaling := extra(wrapped, "scaling")) is not None:
                args, kwargs = scaling.inputs(args, kwargs)
            yield args, kwargs, target

    def _fit_rows(self, wrapped: Any, inputs: Any) -> None:
        density, record = self.model(wrapped), wrapped._workbench
        collected: list[list[Tensor]] = []
        logits: list[Tensor | None] = []
        labels: list[Tensor | None] = []
        made: list[tuple[list[Tensor], Tensor, str]] = []
        measured: list[int] | None = None  # the shape of targets that are numbers
        rows = 0
        with torch.no_grad():
            for args, kwargs, target in self._batches(wrapped, inputs, MOST_ROWS):
                y, n, features, _ = self.features(wrapped, args, kwargs)
                collected.append(features)
                logits.append(class_scores(wrapped, y, n) if self.wrapper.classes is not False else None)
                labels.append(class_numbers(target, logits[-1]))
                measured = measured or measurements(target)
                if density.takes_outliers and self.rows_first and sum(len(part[1]) for part in made) < MOST_OUTLIERS:
                    made += self._outliers(wrapped, args, kwargs, n, rows)
                rows += n
                if rows >= MOST_ROWS:
                    break
        if not collected:
            raise ValueError("fit got no inputs; give the training inputs as a tensor or a loader")
        scores = torch.cat(logits) if all(part is not None for part in logits) else None  # type: ignore[arg-type]
        known = torch.cat(labels) if all(part is not None for part in labels) else None  # type: ignore[arg-type]
        asked = self.wrapper.classes or density.needs_logits
        if asked and scores is None:
            raise ValueError(
                f"neo: density={type(density).__name__} is to use class scores, and the model has no output [rows, classes] with at least two "
                "classes; choose another density, or classes=False"
            )
        if asked and not has_classes(record.output) and self.wrapper.classes is None and measured:
            raise ValueError(
                f"neo: density={type(density).__name__} is to use class scores, and the targets are numbers {measured}, no class numbers or "
                'probabilities; choose another density, or say output="logits" if the model is a classifier'
            )
        features = [torch.cat(parts) for parts in zip(*collected, strict=True)]
        head = (
            last_layer(wrapped, self.sites[-1], density, features[-1], scores)
            if density.needs_head or density.uses_head
            else None
        )
        classifies = asked or (self.wrapper.classes is None and (has_classes(record.output) or known is not None))
        with torch.enable_grad():
            # a density of the user's own may know neither
            options: dict[str, Any] = {} if head is None else {"head": head}
            if density.takes_outliers:
                options["outliers"] = gathered(made)
            density.fit(features, scores if classifies else None, known if density.uses_labels else None, **options)

    def _outliers(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], rows: int, seed: int
    ) -> Iterator[tuple[list[Tensor], Tensor, str]]:
        """Features, class scores and the kind of rows that are made of those of a batch."""
        for kind, inputs in unlike((args, kwargs), rows, seed):
            y, n, features, _ = self.features(wrapped, *inputs)
            if (scores := class_scores(wrapped, y, n)) is not None:
                yield features, scores, kind

    def features(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], take: Take | None = None
    ) -> tuple[Any, int, list[Tensor], FeatureTap]:
        """The model's output, its number of rows, and of every layer that was chosen one vector a row, or what `take` makes of its map."""
        leaves = tensors((args, kwargs))
        rows = self._expected_rows(leaves)
        output, tap = self._pass(wrapped, args, kwargs, rows, take)
        outputs = [t for t in tensors(output) if t.dim()]
        n_rows = outputs[0].shape[0] if outputs else None
        if len(outputs) > 1 and len(outputs) in {t.shape[0] for t in leaves if t.dim()}:
            n_rows = len(outputs)  # a part for each row
        if n_rows is None:
            raise ValueError("neo gives one risk a row, but the model's output has no rows (a single number)")
        if n_rows != rows:  # pooled as it came, so that no map need be kept: once more with the right number of rows
            places = [(i, dim) for i, t in enumerate(leaves) for dim, size in enumerate(t.shape) if size == n_rows]
            self._rows_at = next(iter(places), self._rows_at)
            output, tap = self._pass(wrapped, args, kwargs, n_rows, take)
        if not self.model(wrapped).needs_features:
            return output, n_rows, [], tap
        if take is not None and self._sites is None:
            self.layout = layout_of(wrapped._workbench.output, output, tap)
            if self.layout is None:
                return output, n_rows, [], tap
        if self._sites is None:
            alike = [name for name in tap.taps if take is None or tap.layouts[name][0] == self.layout[0]]  # type: ignore[index]
            same = {name: other for name, other in tap.same.items() if name in alike}
            self._sites = self._choose([name for name in alike if name not in same], same)
        missing = [name for name in self._sites if name not in tap.taps]
        if missing:
            raise RuntimeError(
                f"neo: {missing[0]} gave no feature of {n_rows} rows in this call, as it did in the first; choose layers= that always run"
            )
        if not self._met:
            self._met = frozenset().union(*(names for names in tap.calls if not names.isdisjoint(self._sites)))
        return output, n_rows, [tap.taps[name] for name in self._sites], tap

    def _expected_rows(self, leaves: list[Tensor]) -> int | None:
        i, dim = self._rows_at
        return leaves[i].shape[dim] if i < len(leaves) and dim < leaves[i].dim() else None

    def _pass(
        self, wrapped: Any, args: tuple, kwargs: dict[str, Any], rows: int | None, take: Take | None
    ) -> tuple[Any, FeatureTap]:
        """One pass of the model in evaluation mode."""
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

    def _choose(self, names: list[str], same: dict[str, str]) -> list[str]:
        if self.layers is not None:
            every = [*names, *same]
            chosen = [n for n in every if any(n == layer or n.startswith(f"{layer}.") for layer in self.layers)]
            names = list(dict.fromkeys(same.get(name, name) for name in chosen))
        if not names:
            raise ValueError("neo found no layer whose input has one feature vector a row; name other layers=")
        if self.layers is None and len(names) > MOST_SITES:
            names = [names[round(i * (len(names) - 1) / (MOST_SITES - 1))] for i in range(MOST_SITES)]
        return names


def _name_of(density: Density) -> str:
    """What a density is called in settings."""
    return next((name for name, kind in DENSITIES.items() if kind is type(density)), type(density).__name__.lower())


def _of_positions(density: Density) -> Positions:
    template = copy.deepcopy(density)
    template.forget()
    return Positions(template).to(density.centre.device)


__all__ = ["Neo", "Wrapper"]
