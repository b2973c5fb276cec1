"""neo on whole models: its choice of features and classes, padded sequences, and every density by name."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.density_rows import draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import workbench
from workbench import neo
from workbench.errors import NotFittedError
from workbench.methods import row_risk
from workbench.methods.densities import DENSITIES, Gaussian, pool

GROUPS = torch.arange(300) % 3
X = 4 * draw(3, 5, seed=1)[GROUPS] + draw(300, 5, seed=2)
every = pytest.mark.parametrize("name", DENSITIES)


def classifier(outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, outputs))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(net(X), GROUPS).backward()
            optimizer.step()
    net.zero_grad(set_to_none=True)
    return net.eval()


def density(wrapped: Any) -> Any:
    return wrapped.get_submodule("extras@workbench").density


def knows_classes(wrapped: Any) -> bool:
    return density(wrapped).get_submodule("relative").directions.numel() > 0


def pairs(y: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(X, y), 50)


# ---- when a model has classes ----------------------------------------------------------------------------------------
def test_a_model_has_classes_where_it_is_said_or_trained_so() -> None:
    net = classifier()
    assert knows_classes(neo.Wrapper(output="logits")(net).fit(X))
    assert knows_classes(neo.Wrapper(output="probs")(nn.Sequential(net, nn.Softmax(1))).fit(X))
    assert knows_classes(neo.Wrapper(classes=True)(net).fit(X))
    assert knows_classes(neo.Wrapper()(net).fit(pairs(GROUPS)))
    trained = neo.Wrapper()(classifier())
    workbench.fit(trained, (X, GROUPS), epochs=1, progress=False)
    assert knows_classes(trained)


def test_several_outputs_alone_are_no_classes() -> None:
    net = classifier()
    assert not knows_classes(neo.Wrapper()(net).fit(X))
    assert not knows_classes(neo.Wrapper()(net).fit(pairs(draw(300, 3))))  # three targets
    # no class numbers of three classes: counts, say
    assert not knows_classes(neo.Wrapper()(net).fit(pairs(GROUPS + 1)))
    assert not knows_classes(neo.Wrapper(output="logits", classes=False)(net).fit(X))
    with pytest.raises(ValueError, match="one score per row"):
        neo.Wrapper(output="logits")(nn.Linear(5, 1)).fit(X)
    trained = neo.Wrapper()(nn.Linear(5, 3))
    workbench.fit(trained, (X, X[:, :3]), epochs=1, progress=False)
    assert not knows_classes(trained)


def test_labels_do_not_change_the_default_and_do_change_classwise() -> None:
    net = classifier()
    shuffled = GROUPS[torch.randperm(300, generator=torch.Generator().manual_seed(1))]
    risks = [neo.Wrapper(output="logits")(net).eval().fit(pairs(y))(X, return_risk=True)[1] for y in (GROUPS, shuffled)]
    assert torch.equal(risks[0], risks[1])
    risks = [
        neo.Wrapper(density="classwise")(net).eval().fit(pairs(y))(X, return_risk=True)[1] for y in (GROUPS, shuffled)
    ]
    assert not torch.allclose(risks[0], risks[1], atol=0.1)


def test_a_row_without_a_class_counts_for_the_predicted_one() -> None:
    net = classifier()
    labels = GROUPS.roll(7).where(torch.arange(300) % 4 > 0, -100)
    filled = torch.where(labels == -100, net(X).argmax(1), labels)
    risks = [
        neo.Wrapper(density="mahalanobis", output="logits")(net).eval().fit(pairs(y))(X, return_risk=True)[1]
        for y in (labels, filled, net(X).argmax(1))
    ]
    assert torch.equal(risks[0], risks[1])
    assert not torch.allclose(risks[0], risks[2], atol=0.1)


# ---- every density by its name ---------------------------------------------------------------------------------------
@every
def test_every_density_finds_strange_rows_and_leaves_predictions_alone(name: str) -> None:
    net = classifier()
    wrapped: Any = neo.Wrapper(density=name, output="logits")(net).eval().fit(X)
    y, risk = wrapped(X, return_risk=True)
    assert torch.equal(y, net(X))
    assert risk.shape == (300,)
    assert risk.median().abs() < 1
    between = (X[GROUPS == 0] + X[GROUPS == 1]) / 2
    assert wrapped(between, return_risk=True)[1].mean() > risk.mean() + 0.5


@every
def test_every_density_survives_copies_and_files(name: str, tmp_path: Path) -> None:
    net = classifier()
    wrapped: Any = neo.Wrapper(density=name, output="logits")(net).eval().fit(X)
    expected = wrapped(X[:9], return_risk=True)[1]
    workbench.save(wrapped, tmp_path / "model")
    loaded = neo.Wrapper(density=name, output="logits")(classifier()).eval()
    loaded.load_state_dict(wrapped.state_dict())
    others = [
        copy.deepcopy(wrapped),
        pickle.loads(pickle.dumps(wrapped)),
        loaded,
        workbench.load(tmp_path / "model", classifier()),
    ]
    for other in others:
        assert torch.equal(other.eval()(X[:9], return_risk=True)[1], expected)
        assert type(density(other)) is DENSITIES[name]


@every
def test_every_density_before_fit(name: str) -> None:
    wrapped: Any = neo.Wrapper(density=name, output="logits")(classifier())
    with pytest.raises(NotFittedError, match=r"wrapped\.fit\(loader\)"):
        wrapped.eval()(X, return_risk=True)
    wrapped.train()
    if DENSITIES[name].trainable:
        before = copy.deepcopy(list(wrapped.base_parameters()))
        wrapped(X, return_risk=True)[1].mean().backward()
        assert all(p.grad is None for p in wrapped.base_parameters())
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in density(wrapped).parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, wrapped.base_parameters(), strict=True))
    else:
        with pytest.raises(NotFittedError, match="cannot be trained"):
            wrapped(X, return_risk=True)
        with pytest.raises(RuntimeError, match="nothing to train by gradient"):
            wrapped.fit(X)(X, return_risk=True)[1].mean().backward()


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="classes must be True, False or None, not 3"):
        neo.Wrapper(classes=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Energy works on class scores, and classes=False"):
        neo.Wrapper(density="energy", classes=False)
    with pytest.raises(ValueError, match="MaxLogit works on logits"):
        neo.Wrapper(density="max_logit", output="probs")(classifier())
    with pytest.raises(ValueError, match="layers: the model has no module 'trunk'; it has 0, 1, 2"):
        neo.Wrapper(layers="trunk")(classifier())
    for wrapper in (neo.Wrapper(density="energy"), neo.Wrapper(classes=True)):
        with pytest.raises(ValueError, match=r"no output \[rows, classes\]"):
            wrapper(nn.Linear(5, 1)).fit(X)


# ---- which features --------------------------------------------------------------------------------------------------
def test_regression_takes_the_input_and_every_hidden_layer() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))
    wrapped: Any = neo.Wrapper()(net).eval().fit(X)
    joint = Gaussian()
    with torch.no_grad():
        joint.fit([X, net[:2](X), net[:4](X)])
        torch.testing.assert_close(
            wrapped(X[:9], return_risk=True)[1], joint.eval()([part[:9] for part in (X, net[:2](X), net[:4](X))])
        )


def test_a_map_that_two_layers_read_is_taken_once() -> None:
    class Residual(nn.Module):
        """A block with a shortcut."""

        def __init__(self) -> None:
            super().__init__()
            self.main, self.short, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.main(x) + self.short(x)))

    wrapped: Any = neo.Wrapper()(Residual()).eval().fit(X)
    assert len(density(wrapped).reductions) == 2
    named: Any = neo.Wrapper(layers="short")(Residual()).eval().fit(X)
    assert len(density(named).reductions) == 1


def test_what_is_written_into_later_is_taken_as_it_was() -> None:
    class Writing(nn.Module):
        """The activation overwrites what the layer before it has read."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1
            y = self.first(h)
            h.mul_(0)
            return self.last(y)

    model = Writing()
    wrapped: Any = neo.Wrapper(layers="first")(model).eval().fit(X)
    plain = Gaussian()
    plain.fit([X])
    torch.testing.assert_close(wrapped(X[:9], return_risk=True)[1], plain.eval()([X[:9]]))


def test_a_layer_that_learned_queries_share_with_data_is_tapped_at_the_data() -> None:
    class Attending(nn.Module):
        """Learned queries pass through the layer first, as in attention with packed projections."""

        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.ones(1, 5))
            self.projection, self.head = nn.Linear(5, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            query = self.projection(self.query.expand(len(x), 5))
            return self.head(query * self.projection(x))

    wrapped: Any = neo.Wrapper(layers="projection")(Attending()).eval().fit(X.split(100))
    joint = Gaussian()
    joint.fit([X])
    torch.testing.assert_close(wrapped(X[:9], return_risk=True)[1], joint.eval()([X[:9]]))


def test_sorted_data_are_met_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_risk, "MAX_ROWS", 100)
    rows = X[GROUPS.argsort()]
    usual = neo.Wrapper()(nn.Linear(5, 1)).eval()
    last = rows[-50:]
    for inputs in (rows, rows.split(10), DataLoader(TensorDataset(rows, rows), 10)):
        wrapped: Any = usual.fit(inputs)
        assert wrapped(last, return_risk=True)[1].mean() < 2
    assert usual.fit(iter(rows.split(10)))(last, return_risk=True)[1].mean() > 2  # nobody knows how many will come


# ---- sequences -------------------------------------------------------------------------------------------------------
class Encoder(nn.Module):
    """A transformer over tokens, pooled over those that are no padding."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.tokens(ids)
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.encoder(h, src_key_padding_mask=attention_mask == 0)
        h = h if self.batch_first else h.transpose(0, 1)
        weights = attention_mask[:, :, None].to(h)
        return self.head((h * weights).sum(1) / weights.sum(1))


def sentences(n: int, t: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (n, t), generator=generator)
    lengths = torch.randint(2, t + 1, (n, 1), generator=generator)
    mask = (torch.arange(t) < lengths).long()
    return ids * mask, mask


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_row_has_the_same_risk_in_every_batch_and_with_any_padding(batch_first: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Encoder(batch_first).eval()
    ids, mask = sentences(200, 12)
    wrapped: Any = neo.Wrapper(output="logits")(model).eval()
    wrapped.fit([{"ids": ids, "attention_mask": mask}])
    with torch.no_grad():
        expected = wrapped(ids, attention_mask=mask, return_risk=True)[1]
        for rows in (slice(0, 12), slice(12, 24), slice(0, 5), slice(7, 8)):  # also as many rows as steps
            risk = wrapped(ids[rows], mask[rows], return_risk=True)[1]
            torch.testing.assert_close(risk, expected[rows], rtol=1e-3, atol=1e-3)
        longer = F.pad(ids[:20], (0, 8), value=7), F.pad(mask[:20], (0, 8))
        torch.testing.assert_close(wrapped(*longer, return_risk=True)[1], expected[:20], rtol=1e-3, atol=1e-3)
        strange = ids[:50].clone().masked_fill(mask[:50] == 1, 25)  # a word that was never there
        assert wrapped(strange, mask[:50], return_risk=True)[1].median() > expected.quantile(0.9)


class Recurrent(nn.Module):
    """The last state of a GRU, steps first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 6, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[1][-1])


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_as_many_rows_as_steps(batch_first: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Recurrent(batch_first).eval()
    x = draw(200, 10, 3).cumsum(1)
    lay = (lambda part: part) if batch_first else (lambda part: part.transpose(0, 1))
    wrapped: Any = neo.Wrapper()(model).eval().fit([lay(x)])
    with torch.no_grad():
        expected = wrapped(lay(x), return_risk=True)[1]
        assert expected.shape == (200,)
        for rows in (slice(0, 10), slice(5, 12)):
            torch.testing.assert_close(wrapped(lay(x[rows]), return_risk=True)[1], expected[rows], rtol=1e-3, atol=1e-3)
        backwards = wrapped(lay(x.flip(1)), return_risk=True)[1]
        assert backwards.mean() > expected.mean() + 1  # the halves are not alike


# ---- encoder layers of torch with a fused kernel ---------------------------------------------------------------------
class Kernels(TorchDispatchMode):
    """Counts calls of the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.fused += "transformer_encoder_layer" in function.name()
        return function(*args, **(kwargs or {}))


def encoder(layers: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        return nn.Sequential(nn.Linear(3, 8), stack, nn.Linear(8, 1)).eval()


@pytest.mark.parametrize("steps", [4, 6])  # as many as rows, and more
def test_encoder_layers_without_features_inside_run_as_a_whole(steps: int) -> None:
    model, x = encoder(layers=12), draw(4, steps, 3)
    wrapped: Any = neo.Wrapper(per="row")(model).eval().fit(draw(200, steps, 3, seed=1))
    method = wrapped._workbench.methods[0]
    first = "1.layers.9.self_attn.in_proj_weight"
    inside = {site.removeprefix("1.layers.").partition(".")[0] for site in method.sites if "layers" in site} - {"9"}
    assert first in method.sites
    inputs: list[Tensor] = []
    copied: Any = copy.deepcopy(model)
    copied[1].layers[9].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    with torch.no_grad():
        copied(x)
        with Kernels() as kernels:
            y, risk = wrapped(x, return_risk=True)
        assert kernels.fused == 12 - len(inside)
        torch.testing.assert_close(y, model(x))
        features = method.features(wrapped, (x,), {})[2][method.sites.index(first)]
        torch.testing.assert_close(features, pool(inputs[0], 4))
    with_gradients = wrapped(x, return_risk=True)[1]  # where torch does not use the kernel
    torch.testing.assert_close(with_gradients, risk, rtol=1e-4, atol=1e-4)


def test_a_density_of_the_last_features_observes_no_other_layer() -> None:
    model, x = encoder(), draw(4, 6, 3)
    wrapped: Any = neo.Wrapper(density="knn", per="row")(model).eval().fit(draw(200, 6, 3, seed=1))
    assert wrapped._workbench.methods[0].sites == ["2.weight"]
    with torch.no_grad(), Kernels() as kernels:
        y, _ = wrapped(x, return_risk=True)
    assert kernels.fused == 3
    assert torch.equal(y, torch.no_grad()(model)(x))


@pytest.mark.parametrize("chosen", ["1.layers.1.linear1", "1.layers.1", "1"])
def test_layers_inside_an_encoder_layer_can_be_chosen(chosen: str) -> None:
    model, x = encoder(), draw(4, 6, 3)
    wrapped: Any = neo.Wrapper(layers=[chosen], per="row")(model).eval().fit(draw(200, 6, 3, seed=1))
    assert "1.layers.1.linear1.weight" in wrapped._workbench.methods[0].sites
    with torch.no_grad(), Kernels() as kernels:
        y, _ = wrapped(x, return_risk=True)
    assert kernels.fused == (0 if chosen == "1" else 2)
    torch.testing.assert_close(y, model(x))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.cat([left, right], 1))))


def test_a_loader_of_two_inputs_is_taken_for_that_where_the_model_needs_both() -> None:
    torch.manual_seed(0)
    wrapped = [neo.Wrapper()(model) for model in [Joined()] * 4]
    left, right = X[:, :2], X[:, 2:]
    pairs = TensorDataset(left, right)
    wrapped[0].fit([((left, right),)])  # a batch of one element, the inputs
    for other, data in zip(wrapped[1:], (pairs, DataLoader(pairs, batch_size=len(X)), [(left, right)]), strict=True):
        other.fit(data)
        torch.testing.assert_close(
            other(left, right, return_risk=True)[1], wrapped[0](left, right, return_risk=True)[1]
        )
    with pytest.raises(TypeError, match="right"):
        neo.Wrapper()(Joined()).fit(left)
