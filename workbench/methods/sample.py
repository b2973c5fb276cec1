"""Sample: epistemic risk from the spread of several passes with random noise, as in Monte Carlo dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.method import Call, Method
from ..core.quantized import refuse_quantized
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from ..engine.effects.reseeding import CallSeeds
from ..engine.plan import Axis, Index, Intervention, Shared
from ..engine.sites import Sites
from ..engine.tree import is_float, tree_map
from .computed_weights import refuse_signs
from .learned_noise import SitesWithAmounts, noisy_weights
from .noise import Bernoulli, Noise, Normal
from .weight_sets import method_of

if TYPE_CHECKING:
    from ..core.ownership import Table


# Branches on computed values within one pass, after which a loop counts as endless: decoding text takes one per token, a fixed-step solver none.
MAX_DECISIONS = 5_000
_DECISIONS = frozenset(["__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "__array__"])


class Wrapper(_Wrapper):
    """Epistemic risk from the spread of noisy passes (Gal & Ghahramani 2016, Monte Carlo dropout).

    In training mode `wrapped(x)` draws one noise per call; with `return_risk=True`, and always in evaluation mode, n_samples passes are
    averaged.

    Example:
        >>> import torch
        >>> model = Wrapper(n_samples=8, distribution=Bernoulli(0.2))(torch.nn.Linear(2, 1))
        >>> y, risk = model(torch.ones(4, 2), return_risk=True)
        >>> risk.shape
        torch.Size([4, 1])
    """

    n_samples: int = setting(default=5, least=1, saved=True, help="number of passes, at least 1.")
    distribution: type[Noise] | Noise = setting(
        default=Bernoulli,
        classes=(Bernoulli, Normal),
        saved=True,
        help="distribution of the noise: `Bernoulli(p)` zeroes values with probability p; `Normal(scale)` multiplies them by N(1, scale^2), or, "
        "for inputs, adds N(0, scale^2).",
    )
    where: Literal["activations", "weights", "inputs"] = setting(
        default="activations",
        saved=True,
        help='what the noise is applied to: "activations", the inputs of layers with weights (linear, convolution, attention, recurrent, '
        'functional calls), except the model\'s own input unless there is only one layer; "weights" (Wan et al. 2013, DropConnect); or '
        '"inputs", the inputs of the model.',
    )
    trainable: bool = setting(
        default=False,
        saved=True,
        help="learn the amount of noise, one number for each layer that noise enters (concrete dropout, Gal et al. 2017; variational dropout, "
        "Kingma et al. 2015); the regularization term is part of `wrapped.loss` once `workbench.fit` has set the number of training rows.",
    )
    randomness: Literal["different", "same", "error", "pass"] = setting(
        default="different",
        trains=True,
        help='whether the model\'s own random calls differ between samples: "different", "same", or "error" (refused); "pass" is like '
        '"different", except that a layer that runs several times within one pass gets the same noise each time (Gal & Ghahramani 2016b, '
        "variational dropout of recurrent networks), which models that run a solver need, such as neural ODEs. If a solver calls the wrapped "
        "model itself, wrap the function that runs the solver, or see `hold_noise`.",
    )

    def make(self) -> list[Method]:
        return [Sample(self)]


@contextmanager
def hold_noise(wrapped: Any) -> Iterator[None]:
    """Hold the noise of a model wrapped by `sample.Wrapper` fixed over all calls, for a solver that calls the wrapped model many times.

    Sample k gets the same noise in each call within the block, as long as the inputs keep their shape. The solver then follows the mean of
    the samples; to make it follow each sample, for a risk of its result, wrap the function that runs the solver. The model's own dropout is not
    held fixed.

    Args:
        wrapped: model wrapped by `sample.Wrapper`.

    Raises:
        TypeError: if the model is not wrapped by sample.

    Example:
        >>> import torch
        >>> model = Wrapper()(torch.nn.Linear(2, 1))
        >>> x = torch.ones(4, 2)
        >>> with hold_noise(model):
        ...     torch.equal(model(x), model(x))
        True
    """
    method = method_of(wrapped, "sample")
    before = method.held
    method.held = int(torch.randint(2**62, ()).item())
    try:
        yield
    finally:
        method.held = before


class Sample(Method):
    """Method behind `Wrapper`, for one model."""

    name, kind, order = "sample", "epistemic", 20
    held: int | None = None  # seed of all calls within `hold_noise`
    _amounts: list[str] | None = None  # weights that have a learned amount of noise; None: all

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper)
        self.noise: Noise = self.wrapper.distribution
        self._weights: list[str] = []
        self._only_layer = False
        # by mode, since validation between epochs has a seed of its own: seeds of the noise if the model seeds torch's generators itself
        self.apart: dict[bool, CallSeeds] = {}

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "distribution": repr(self.noise)}

    def axis(self, call: Call) -> Axis | None:
        several = not call.loss and (call.return_risk or not call.training) and not call.dealt
        randomness = "different" if self.wrapper.randomness == "pass" else self.wrapper.randomness
        return Axis(self.name, self.wrapper.n_samples, randomness, apart=True) if several else None

    def attach(self, table: Table) -> None:
        self._weights = [name for name in table.parameters() if table.value(name).dim() >= 2]
        if self.wrapper.where == "weights" and not self._weights:
            raise ValueError(
                'the model has no weights of two or more dimensions for where="weights"; use where="inputs"'
            )
        if self.wrapper.where == "weights":
            refuse_quantized(table, self._weights, "noise is drawn for its values", "use where='activations'")
            refuse_signs(table, self._weights, "noise", 'where="activations"')
        self._only_layer = len(table.layers()) <= 1
        if self.wrapper.where == "weights":
            for name in self._weights:
                table.record.rules.setdefault(name, Shared(name))
        if not self.wrapper.trainable:
            return
        if self.wrapper.where == "activations":
            self._amounts = noisy_weights(table, self._weights)
        for name in self.amounts() if self.wrapper.where != "inputs" else ["inputs"]:
            self._register_amount(table, name)

    def _register_amount(self, table: Table, name: str) -> None:
        like = table.value(name) if name != "inputs" else next(table.value(n) for n in table.parameters())
        table.register(f"{name}@sample", torch.tensor(self.noise.raw(), dtype=torch.float32, device=like.device))

    def amounts(self) -> list[str]:
        """Return the names of the weights that have a learned amount of noise."""
        return self._weights if self._amounts is None else self._amounts

    def adapt(self, table: Table, names: set[str]) -> None:
        stored = [name for name in self._weights if f"{name}@sample" in names]
        if not (self.wrapper.trainable and self.wrapper.where == "activations" and stored):
            return
        for name in {*self.amounts()} - {*stored}:
            table.drop(f"{name}@sample")
        for name in {*stored} - {*self.amounts()}:
            self._register_amount(table, name)
        self._amounts = stored

    def repeats(self, training: bool) -> bool:
        return type(self.noise).__module__.startswith("workbench.")

    def raw(self, table: Table, name: str) -> Tensor | None:
        """Return the learned amount of noise of a weight, None if the amount is fixed."""
        return table.get(f"{name}@sample") if self.wrapper.trainable else None

    def intervention(self, table: Table, call: Call) -> Intervention | None:
        kind = _NoisyWeights if self.wrapper.where == "weights" else _Noisy
        return kind(self, table, call.training)

    def regularizer(self, table: Table, rows: int | None) -> Tensor | None:
        if not self.wrapper.trainable or not rows or self.wrapper.where == "inputs":
            return None
        raws = {name: table.get(f"{name}@sample") for name in self.amounts()}
        terms = [
            self.noise.divergence(raw) * self._units(table.value(name)) / rows
            for name, raw in raws.items()
            if raw.requires_grad
        ]
        return torch.stack(terms).sum() if terms else None

    def _units(self, weight: Tensor) -> int:
        return weight.numel() if self.wrapper.where == "weights" else weight.shape[1]


class _Noisy(Intervention):
    checkpoint_remedy = 'use sample.Wrapper(where="weights"), or switch checkpointing off'

    def __init__(self, method: Sample, table: Table, training: bool) -> None:
        self.method, self.table, self.taps = method, table, {}
        self.generators: dict[torch.device, torch.Generator] = {}
        self.seed: int | None = None
        self.position = 0  # index of the branch among those with their own noise
        self.training = training
        self.amounts_used: SitesWithAmounts | None = None
        self.sites = 0
        self.in_function = False  # whether noise of the last pass entered inside a `torch.autograd.Function`
        self.draws = method.wrapper.where == "activations" and not method.noise.silent
        if method.held is not None:
            self.loop_only, self.seed = "hold_noise gives each branch the same noise in all calls", method.held
        elif method.wrapper.randomness in ("same", "error"):
            # the model's own random stream is repeated or watched, so the noise needs another one
            self.loop_only = (
                f'randomness="{method.wrapper.randomness}" keeps the noise separate from the model\'s own random calls'
            )
            self.seed = int(torch.randint(2**62, ()).item())
        elif training in method.apart:
            self.draw_apart()
        self.draws_as_model = self.seed is None and not method.noise.silent

    def draw_apart(self) -> None:
        if self.seed is None:
            self.draws_as_model = False
            self.loop_only = "the model seeds torch's random numbers itself, so the noise is drawn separately"
            self.seed = self.method.apart.setdefault(self.training, CallSeeds()).next()

    def output(self, output: Any, index: Index) -> Any:
        if self.training in self.method.apart:
            self.method.apart[self.training].note_end()
        if self.draws and self.in_function:
            output = tree_map(_refuse_backward, output)
        return output

    def _slots(self) -> dict[str, str]:
        """Map the further names of each tied weight to its first name."""
        slots = ((name, self.table.record.slots[name].owners[1:]) for name in self.method._weights)
        return {f"{path}.{attribute}".lstrip("."): name for name, others in slots for path, attribute in others}

    def _begin(self, index: Index) -> None:
        """Start the random stream of a branch, which depends only on the branch's position; heads of one trunk share a stream."""
        if self.seed is None:
            return
        axes = [method.axis(Call(training=False, return_risk=True)) for method in self.table.record.methods]
        heads = {axis.name for axis in axes if axis is not None and axis.own_first}
        self.generators.clear()
        self.position = 0
        for name in sorted(index.keys() - heads):
            self.position = 10_007 * self.position + index[name]

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.seed is None:
            return None
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed((self.seed + self.position) % 2**63)
        return self.generators[device]

    def _noisy(self, value: Tensor, raw: Tensor | None, additive: bool = False) -> Tensor:
        return self.method.noise.apply(value, raw, self._generator(value.device), additive)

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], index: Index
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._begin(index)
        if self.method.wrapper.where != "inputs":
            return args, kwargs
        raw = self.method.raw(self.table, "inputs")
        return tree_map(lambda leaf: self._noisy(leaf, raw, additive=True) if is_float(leaf) else leaf, (args, kwargs))

    def active(
        self, parameters: Sequence[tuple[Tensor, str]], state: Sequence[Tensor], inputs: list[Tensor]
    ) -> AbstractContextManager[Any] | None:
        if self.method.wrapper.where != "activations":
            return None
        self.trail = ()
        once = self.method.held is not None or self.method.wrapper.randomness == "pass"
        factors: dict[tuple, Tensor] = {}  # noise factors of this pass, by layer and argument
        self.amounts_used = (
            SitesWithAmounts(self.method.amounts(), self.method._weights) if self.method.wrapper.trainable else None
        )
        slots = self._slots() if self.amounts_used is not None else {}

        def at_site(names: frozenset[str], leaves: list[Any], live: list[int], raw: list[int]) -> list[Any]:
            amount = None
            noisy = [*live, *(raw if self.method._only_layer else [])]
            if self.amounts_used is not None:
                name = self.amounts_used.note({slots.get(name, name) for name in names}, bool(noisy))
                amount = self.method.raw(self.table, name) if name else None
            layer = tuple(sorted(names))
            self.trail = (*self.trail, (layer, tuple(live), tuple(raw)))
            leaves = list(leaves)
            for i in noisy:
                self.sites += 1
                if not once:
                    leaves[i] = self._noisy(leaves[i], amount)
                    continue
                key = (layer, i, tuple(leaves[i].shape), leaves[i].dtype, leaves[i].device)
                if key not in factors:
                    factors[key] = self._noisy(torch.ones_like(leaves[i]), amount)  # both kinds of noise multiply
                leaves[i] = leaves[i] * factors[key]
            return leaves

        sites = _NoisySites(parameters, state, inputs, at_site, contractions=bool(self.method._weights))
        sites.may_be_endless = self.draws and not once
        return _CountedSites(sites, self)


def _refuse_backward(leaf: Any) -> Any:
    """Let the backward pass through an output raise."""
    if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
        leaf.register_hook(_raise_in_backward)
    return leaf


def _raise_in_backward(gradient: Tensor) -> None:
    raise RuntimeError(
        "a layer of the model lies inside a torch.autograd.Function, whose backward() does not know the noise on the activations in its "
        'forward(), so that gradients would be wrong: use sample.Wrapper(where="weights") or where="inputs"'
    )


class _NoisySites(Sites):
    """Sites that stop a loop which noise keeps from ending: one whose end depends on computed values, as in adaptive solvers."""

    may_be_endless = False  # whether each call of a layer draws new noise
    decisions = 0

    def __torch_function__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.may_be_endless and getattr(function, "__name__", "") in _DECISIONS:
            self.decisions += 1
            if self.decisions >= MAX_DECISIONS:
                raise RuntimeError(
                    f"the model has branched {self.decisions} times within one pass on values that it computed under noise. Each call of a "
                    'layer draws new noise, so that a solver with adaptive steps never ends: use sample.Wrapper(randomness="pass"), which '
                    'draws one noise for all calls of a layer within a pass, or where="weights"'
                )
        return super().__torch_function__(function, kinds, args, kwargs)


class _NoisyWeights(_Noisy):
    def tensors(self, installed: dict[str, Tensor], index: Index) -> dict[str, Tensor]:
        self._begin(index)
        noisy = {name: self._noisy(installed[name], self.method.raw(self.table, name)) for name in self.method._weights}
        return {**installed, **noisy}


class _CountedSites:
    """Context of a pass that counts the sites where noise enters, and raises if there were none: all passes would be equal."""

    def __init__(self, sites: Sites, noisy: _Noisy) -> None:
        self.sites, self.noisy = sites, noisy

    def __enter__(self) -> None:
        self.noisy.sites = 0
        self.noisy.in_function = False
        self.sites.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.sites.__exit__(kind, error, trace)
        self.noisy.in_function = self.sites.in_function
        if isinstance(error, RuntimeError) and "randomness error mode" in str(error):
            raise RuntimeError(
                'the model uses torch.func transforms, inside which noise on activations cannot be drawn; use where="weights", or '
                'pass randomness="different" to the model\'s own vmap (jacrev and hessian cannot)'
            ) from error
        if error is None and not self.noisy.sites:
            raise RuntimeError(
                "sample found no activation that enters a layer with weights (matrix products, convolutions, recurrent layers), so all "
                'its passes would be equal; use where="weights" or where="inputs"'
            )
        if (
            error is None
            and self.noisy.amounts_used is not None
            and self.noisy.training
            and not torch.compiler.is_compiling()
        ):
            self.noisy.amounts_used.check(self.noisy.table)


__all__ = ["Bernoulli", "Normal", "Sample", "Wrapper", "hold_noise"]
