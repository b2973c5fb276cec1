"""Sample's noise enters wherever data meet a weight, however the weight is read and the product is written."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from workbench import sample

Head = Callable[[nn.Linear, Tensor], Tensor]


def out_of_place(fc: nn.Linear, h: Tensor) -> Tensor:
    result = h.new_empty(len(h), 6)
    torch.mm(h, fc.weight.T, out=result)
    return result


def in_place(fc: nn.Linear, h: Tensor) -> Tensor:
    result = h.new_zeros(len(h), 6)
    result.addmm_(h, fc.weight.T)
    return result


HEADS: dict[str, Head] = {
    "T": lambda fc, h: h @ fc.weight.T,
    "mT": lambda fc, h: torch.matmul(h, fc.weight.mT),
    "H": lambda fc, h: h @ fc.weight.H,
    "data": lambda fc, h: F.linear(h, fc.weight.data),
    "real": lambda fc, h: F.linear(h, torch.complex(fc.weight, fc.weight).real),
    "t": lambda fc, h: h @ fc.weight.t(),
    "linalg": lambda fc, h: torch.linalg.matmul(h, fc.weight.T),
    "multi_dot": lambda fc, h: torch.linalg.multi_dot([h, fc.weight.T, torch.eye(6)]),
    "vecdot": lambda fc, h: torch.linalg.vecdot(h[:, None], fc.weight),
    "dot": lambda fc, h: torch.stack([torch.stack([torch.dot(row, w) for w in fc.weight]) for row in h]),
    "aten": lambda fc, h: torch.ops.aten.mm.default(h, fc.weight.T),
    "out": out_of_place,
    "in_place": in_place,
}


class Two(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.body, self.fc, self.head = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.head(self.fc, h), self.fc(h)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_weight_meets_noise_however_it_is_read(head: Head) -> None:
    """Noise of Bernoulli(p) on h has a known spread, so that the risk of many samples tells whether all of it entered."""
    torch.manual_seed(0)
    model, p = Two(head), 0.2
    x = torch.randn(3, 4)
    with torch.no_grad():
        y, risk = sample.Wrapper(100, sample.Bernoulli(p))(model).eval()(x, return_risk=True)
        h = model.body(x)
        std = (h.square() @ model.fc.weight.square().mT * p / (1 - p)).sqrt()
        for mean, spread, alone in zip(y, risk, model(x), strict=True):
            torch.testing.assert_close(spread, std, rtol=0.4, atol=0.03)
            torch.testing.assert_close(mean, alone, rtol=0, atol=0.2)


def by_item(fc: nn.Linear, h: Tensor) -> Tensor:
    result = torch.empty(len(h), 6)
    result[:, :3] = h[:, :3]
    result[:, 3:] = h[:, 3:]
    return result


def by_view(fc: nn.Linear, h: Tensor) -> Tensor:
    result = torch.zeros(len(h), 6)
    result.view(-1).copy_(h.flatten())
    return result


def into_data(fc: nn.Linear, h: Tensor) -> Tensor:
    result = torch.zeros(len(h), 6)
    result.data[:] = h
    return result


def by_out(fc: nn.Linear, h: Tensor) -> Tensor:
    result = torch.empty(len(h), 6)
    torch.add(h, 0.0, out=result)
    return result


def onto_weights(fc: nn.Linear, h: Tensor) -> Tensor:
    result = (0 * fc.weight[0]).expand(len(h), 6).clone()
    result += h
    return result


WRITES: dict[str, Head] = {
    "item": by_item,
    "view": by_view,
    "data": into_data,
    "out": by_out,
    "index_add": lambda fc, h: torch.zeros(len(h), 6).index_add_(0, torch.arange(len(h)), h),
    "iadd": lambda fc, h: torch.zeros(len(h), 6).__iadd__(h),
    "weights": onto_weights,
    "array": lambda fc, h: torch.from_numpy(h.numpy().copy()),
    "list": lambda fc, h: torch.tensor(h.tolist()),
    "numbers": lambda fc, h: h.new_tensor([[value.item() for value in row] for row in h]),
}


class Experts(nn.Module):
    """Linear layers, one of which is chosen for each row by a router."""

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.router, self.product = nn.Linear(4, 6), nn.Linear(4, 3), product
        self.weight, self.bias = nn.Parameter(torch.randn(3, 6, 2)), nn.Parameter(torch.randn(3, 2))

    def chosen(self, x: Tensor) -> Tensor:
        return self.router(x).argmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.body(x), self.weight, self.bias, self.chosen(x))


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "bmm": lambda h, w, b, i: torch.bmm(h[:, None], w[i])[:, 0] + b[i],
    "einsum": lambda h, w, b, i: torch.einsum("nd,ndo->no", h, w[i]) + b[i],
    "baddbmm": lambda h, w, b, i: torch.baddbmm(b[i][:, None], h[:, None], w[i])[:, 0],
    "baddbmm_one_bias": lambda h, w, b, i: torch.baddbmm(b[:1, None], h[:, None], w[i])[:, 0] - b[0] + b[i],
    "index_select": lambda h, w, b, i: (w.index_select(0, i).mT @ h[..., None])[..., 0] + b[i],
    "gather": lambda h, w, b, i: (h[:, None] @ w.gather(0, i[:, None, None].expand(-1, 6, 2)))[:, 0] + b[i],
    "flat": lambda h, w, b, i: (h[:, None] @ w.flatten(1)[i].view(-1, 6, 2))[:, 0] + b[i],
    "scaled": lambda h, w, b, i: torch.einsum("nd,ndo->no", h, 2 * w[i]) / 2 + b[i],
    "masked": lambda h, w, b, i: torch.einsum("nd,ndo->no", h, (w * torch.ones(6, 2))[i]) + b[i],
}


@pytest.mark.parametrize("strategy", ["loop", "auto"])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_weights_that_data_select_meet_noise(
    product: Callable[..., Tensor], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample.Bernoulli, "apply", lambda self, value, *_: 2 * value)
    torch.manual_seed(0)
    model, x = Experts(product).eval(), torch.randn(5, 4)
    with torch.no_grad():
        h, chosen = 2 * model.body(x), model.chosen(x)
        expected = torch.stack([row @ model.weight[k] + model.bias[k] for row, k in zip(h, chosen, strict=True)])
        y = sample.Wrapper(2, strategy=strategy)(model)(x, return_risk=True)[0]
    torch.testing.assert_close(y, expected)


COMPUTED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "mixed": lambda h, w, b, i: torch.bmm(h[:, None], (h[:, :2, None, None] * w[torch.stack([i, i], 1)]).sum(1))[:, 0],
    "vectors": lambda h, w, b, i: torch.einsum("nd,nd->n", h[:, :2], b[i])[:, None],
}


@pytest.mark.parametrize("product", COMPUTED.values(), ids=COMPUTED)
def test_mixed_experts_and_selected_vectors_are_data(
    product: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample.Bernoulli, "apply", lambda self, value, *_: 2 * value)
    torch.manual_seed(0)
    experts, x = Experts(product).eval(), torch.randn(5, 4)
    with torch.no_grad():
        last = nn.Linear(experts(x).shape[1], 1)
        y = sample.Wrapper(2)(nn.Sequential(experts, last))(x, return_risk=True)[0]
        h = experts.body(x)
        plain = last(2 * product(h, experts.weight, experts.bias, experts.chosen(x)))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(plain, last(experts(x)))
    torch.testing.assert_close(y, plain)
    with pytest.raises(RuntimeError, match='use where="weights"'):
        sample.Wrapper(2)(experts)(x, return_risk=True)


def test_embeddings_that_an_index_selects_are_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Parameter(torch.randn(9, 6)), nn.Linear(6, 6)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.table[ids]
            return (self.fc(h) @ h.mT).softmax(-1) @ h

    monkeypatch.setattr(sample.Bernoulli, "apply", lambda self, value, *_: 2 * value)
    model, ids = Tokens().eval(), torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        h = model.table[ids]
        y, _ = sample.Wrapper(2)(model)(ids, return_risk=True)
        torch.testing.assert_close(y, (model.fc(2 * h) @ h.mT).softmax(-1) @ h)


class Buffered(nn.Module):
    """A layer that reads from a buffer what the layer before has written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("memory", torch.zeros(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.memory[:] = self.body(x).detach()
        return self.fc(self.memory)


def test_data_stay_data_when_they_are_written_into_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample.Bernoulli, "apply", lambda self, value, *_: 2 * value)
    model, x = Buffered().eval(), torch.randn(3, 4)
    with torch.no_grad():
        y, _ = sample.Wrapper(2)(model)(x, return_risk=True)
        torch.testing.assert_close(y, model.fc(2 * model.body(x)))


@pytest.mark.parametrize("strategy", ["loop", "auto"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_data_stay_data_when_they_are_written_into_a_new_tensor(write: Head, strategy: str) -> None:
    torch.manual_seed(0)
    wrapped = sample.Wrapper(100, sample.Bernoulli(0.2), strategy=strategy)(Two(lambda fc, h: fc(write(fc, h)))).eval()
    with torch.no_grad():
        _, (written, alone) = wrapped(torch.randn(3, 4), return_risk=True)
    torch.testing.assert_close(written, alone, rtol=0.4, atol=0.03)


class Computed(nn.Module):
    def __init__(self, weight_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.weight_of = (
            nn.Parameter(torch.randn(6, 6)),
            nn.Parameter(torch.zeros(6)),
            weight_of,
        )
        self.register_buffer("constant", torch.randn(6, 6))

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight_of(self.weight, self.constant), self.bias)


def preallocated(weight: Tensor, constant: Tensor) -> Tensor:
    result = torch.zeros(6, 6)
    result[:3], result[3:] = weight[3:], constant[3:]
    return result


class Masked(Computed):
    """Constants that are no buffers, as in published code."""

    def __init__(self) -> None:
        super().__init__(lambda weight, _: weight * self.mask * self.scales[0])
        self.mask, self.scales = torch.ones(6, 6).tril(), [torch.tensor(0.5), torch.ones(6)]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "unregistered": Masked,
    "mask": lambda: Computed(lambda w, c: w * (c > 0)),
    "masked_fill": lambda: Computed(lambda w, c: w.masked_fill(c > 0, 0)),
    "new_mask": lambda: Computed(lambda w, c: (w * torch.ones(6, 6).tril()).mT.mT),
    "added": lambda: Computed(lambda w, c: c + 0.5 * w[:, :2] @ w[:2]),
    "basis": lambda: Computed(lambda w, c: c @ w),
    "rows": lambda: Computed(lambda w, c: w[torch.arange(5, -1, -1)]),
    "written": lambda: Computed(preallocated),
    "no_bias": lambda: nn.Sequential(
        prune.l1_unstructured(nn.Linear(6, 6, bias=False), "weight", 0.5), nn.Linear(6, 6)
    ),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(6, 6), "weight", 0.5),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
}


@pytest.mark.filterwarnings("ignore:.*neither parameters nor buffers:workbench.WorkbenchWarning")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("strategy", ["loop", "auto"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_weights_computed_with_constants_are_no_data(
    make: Callable[[], nn.Module], strategy: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a noise that doubles whatever it enters, one pass tells where it entered."""
    monkeypatch.setattr(sample.Bernoulli, "apply", lambda self, value, *_: 2 * value)
    torch.manual_seed(0)
    layers = make()
    model, x = (
        nn.Sequential(nn.Linear(4, 6), *(layers if isinstance(layers, nn.Sequential) else [layers])),
        torch.randn(3, 4),
    )
    wrapped = sample.Wrapper(2, strategy=strategy)(model).train(training)
    with torch.no_grad():
        expected = model[0](x)
        for layer in model.eval()[1:]:
            expected = layer(2 * expected)
        torch.testing.assert_close(wrapped(x, return_risk=True)[0], expected)


def test_amounts_of_pruned_weights_are_learned() -> None:
    layer = prune.l1_unstructured(nn.Linear(6, 2), "weight", 0.5)
    wrapped = sample.Wrapper(2, trainable=True)(nn.Sequential(nn.Linear(4, 6), layer)).train()
    wrapped(torch.randn(3, 4)).sum().backward()
    amounts = {name: value for name, value in wrapped.named_parameters() if name.endswith("@sample")}
    assert [name for name, amount in amounts.items() if amount.grad is not None] == ["1.weight_orig@sample"]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_an_input_that_is_written_into_a_new_tensor_is_no_constant(
    write: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(write(self.fc, x))

    monkeypatch.setattr(sample.Bernoulli, "apply", lambda self, value, *_: 2 * value)
    model, x = Alone().eval(), torch.randn(3, 6)
    with torch.no_grad():
        torch.testing.assert_close(sample.Wrapper(2)(model)(x, return_risk=True)[0], model.fc(2 * x))


def test_an_input_that_is_transposed_is_still_the_input() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.first(x.mT)
            return h, self.second(h)

    _, (first, second) = sample.Wrapper()(Transposed()).eval()(torch.randn(4, 3), return_risk=True)
    assert not first.any()
    assert second.all()


# ---- tables that the first call computes -----------------------------------------------------------------------------


class Table(nn.Module):
    """Appends positions to its input, which it computes in every call, or in the first one and keeps."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps, self.table = keeps, None
        self.register_buffer("made", None, persistent=False)
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)

    def positions(self, x: Tensor) -> Tensor:
        if self.keeps == "buffer":
            if self.made is None:
                self.made = torch.linspace(0, 1, 2).repeat(len(x), 1)
            return self.made
        if self.table is None or self.keeps == "nothing":
            table = torch.linspace(0, 1, 2).repeat(len(x), 1)
            self.table = (table, len(x)) if self.keeps == "tuple" else table
        return self.table[0] if self.keeps == "tuple" else self.table

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(torch.cat([x, self.positions(x)], 1))))


@pytest.mark.parametrize("keeps", ["tensor", "tuple", "buffer"])
def test_noise_is_the_same_when_the_model_keeps_a_table(keeps: str) -> None:
    def risk(wrapped: Any) -> Tensor:
        torch.manual_seed(3)
        return wrapped(x, return_risk=True)[1]

    x = torch.randn(6, 3)
    computes, model = Table("nothing").eval(), Table(keeps).eval()
    model.load_state_dict(computes.state_dict())
    expected, wrapped = risk(sample.Wrapper(3)(computes)), sample.Wrapper(3)(model)
    for _ in range(3):
        assert torch.equal(risk(wrapped), expected)
    assert torch.equal(risk(copy.deepcopy(wrapped)), expected)
    model(x)
    assert torch.equal(risk(sample.Wrapper(3)(model)), expected)
