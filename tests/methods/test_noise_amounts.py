"""Learned amounts of noise exist where noise enters, and nowhere else."""

import pytest
import torch
from torch import nn

import workbench
from workbench import sample
from workbench.errors import WorkbenchWarning


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(7, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.rnn(self.words(x))[0][:, -1])


class HeadFirst(nn.Module):
    """The layer that gets the input is registered last."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(8, 1), nn.Linear(2, 8)

    def forward(self, x):
        return self.head(self.body(x).tanh())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.body(self.words(x)))


def network():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(2, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 1))


INPUTS = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(12).reshape(4, 3) % 7
CASES = [
    (network, INPUTS, {"2.weight", "4.weight"}),
    (lambda: nn.Sequential(nn.BatchNorm1d(2), *network()), INPUTS, {"1.weight", "3.weight", "5.weight"}),
    (lambda: nn.Linear(2, 1), INPUTS, {"weight"}),
    (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)), torch.randn(2, 1, 8, 8), {"1.weight"}),
    (Sequence, TOKENS, {"rnn.weight_hh_l0", "head.weight"}),
    (Tied, TOKENS, {"words.weight", "body.weight"}),
    (
        encoder,
        INPUTS[:, None].expand(-1, 3, -1),
        {
            "1.layers.0.self_attn.in_proj_weight",
            "1.layers.0.self_attn.out_proj.weight",
            "1.layers.0.linear1.weight",
            "1.layers.0.linear2.weight",
            "2.weight",
        },
    ),
]


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize(("model", "x", "expected"), CASES)
def test_every_amount_has_a_gradient(model, x, expected, shown):
    torch.manual_seed(0)
    wrapped = sample.Wrapper(trainable=True, example=x if shown else None)(model())
    amounts = {name.partition("@")[0]: p for name, p in wrapped.named_parameters() if "@" in name}
    assert amounts.keys() == expected
    wrapped(x).square().mean().backward()
    assert all(p.grad is not None for p in amounts.values())
    assert all(p.requires_grad for p in amounts.values())


def test_an_example_tells_where_the_order_does_not():
    wrapped = sample.Wrapper(trainable=True, example=INPUTS)(HeadFirst())
    assert {name for name, _ in wrapped.named_risk_parameters()} == {"head.weight@sample"}
    wrapped = sample.Wrapper(trainable=True)(HeadFirst())
    with pytest.warns(WorkbenchWarning, match=r"no noise enters before body\.weight.*before head\.weight.*example=x"):
        wrapped(INPUTS)
    wrapped(INPUTS).sum().backward()
    assert not wrapped.get_parameter("body.weight@sample").requires_grad


def test_the_regularizer_has_a_term_for_each_amount_that_is_learned():
    torch.manual_seed(0)
    wrapped = sample.Wrapper(distribution=sample.Bernoulli(0.2), trainable=True)(network())
    wrapped._workbench.rows = 10
    p = torch.tensor(0.2)
    divergence = p * p.log() + (1 - p) * (1 - p).log()
    (term,) = [
        method.regularizer(workbench.core.ownership.table_of(wrapped), 10) for method in wrapped._workbench.methods
    ]
    torch.testing.assert_close(term, 2 * 8 * divergence / 10)


def test_states_bring_their_amounts_along(tmp_path):
    """Those of objects that were wrapped with another example, or by a version that gave every weight an amount."""
    torch.manual_seed(0)
    shown = sample.Wrapper(trainable=True, example=INPUTS)(HeadFirst())
    plain = sample.Wrapper(trainable=True)(HeadFirst())
    plain.load_state_dict(shown.state_dict())
    assert plain.state_dict().keys() == shown.state_dict().keys()
    workbench.save(shown, tmp_path / "model.safetensors")
    loaded = workbench.load(tmp_path / "model.safetensors", HeadFirst())
    assert loaded.state_dict().keys() == shown.state_dict().keys()
    earlier = sample.Wrapper(trainable=True)(network())
    state = earlier.state_dict()
    state["0.weight@sample"] = torch.tensor(-1.0)
    later = sample.Wrapper(trainable=True)(network())
    later.load_state_dict(state)
    assert later.state_dict()["0.weight@sample"] == -1
    workbench.save(later, tmp_path / "earlier.safetensors")
    again = workbench.load(tmp_path / "earlier.safetensors", earlier)
    assert again.state_dict()["0.weight@sample"] == -1
    with pytest.warns(WorkbenchWarning, match=r"0\.weight"):
        again(INPUTS)
