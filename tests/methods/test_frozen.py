"""Frozen parameters and intentional zeros of the given model stay as they are in every voter."""

import copy

import pytest
import torch
from torch import nn

from workbench import compose, fit, sculpt, snapshot, swag, vote
from workbench.errors import WorkbenchWarning


class Adapted(nn.Module):
    """A linear layer with a LoRA beside it (Hu et al. 2021), as bare parameters or as layers of their own."""

    def __init__(self, base, rank=2, layers=False):
        super().__init__()
        self.base = base.requires_grad_(False)
        n_in, n_out = base.weight.shape[1], base.weight.shape[0]
        if layers:
            self.lora_A, self.lora_B = nn.Linear(n_in, rank, bias=False), nn.Linear(rank, n_out, bias=False)
            nn.init.zeros_(self.lora_B.weight)
        else:
            self.lora_A = nn.Parameter(torch.randn(rank, n_in) / n_in**0.5)
            self.lora_B = nn.Parameter(torch.zeros(n_out, rank))

    def forward(self, x):
        if isinstance(self.lora_A, nn.Linear):
            return self.base(x) + self.lora_B(self.lora_A(x))
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


class Loralib(nn.Linear):
    """As loralib writes it: one layer with an initialization of its own for all of its parameters."""

    def __init__(self, n_in, n_out, rank=2):
        self.lora_A = None
        super().__init__(n_in, n_out)
        self.lora_A, self.lora_B = nn.Parameter(torch.empty(rank, n_in)), nn.Parameter(torch.empty(n_out, rank))
        self.weight.requires_grad_(False), self.bias.requires_grad_(False)
        self.reset_parameters()

    def reset_parameters(self):
        super().reset_parameters()
        if self.lora_A is not None:
            nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
            nn.init.zeros_(self.lora_B)

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


def lora(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)
    for place in (2, 4):
        layer = model[place]
        model[place] = (
            Loralib(layer.in_features, layer.out_features)
            if kind == "loralib"
            else Adapted(layer, layers=kind == "layers")
        )
    return model


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        *[(kind, share) for kind in ("parameters", "layers") for share in (None, 2, "rank1")],
        *[("loralib", share) for share in (None, 1, "rank1")],
    ],
)
def test_adapters_start_at_no_effect_and_differ_after_training(kind, share):
    model, x = lora(kind), torch.randn(64, 2)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    expected = model(x)
    wrapped = vote.Wrapper(3, share=share)(model).eval()
    torch.testing.assert_close(wrapped(x), expected)
    firsts = [[p for name, p in voter.named_parameters() if "lora_A" in name][-1] for voter in wrapped.voters()]
    assert not torch.allclose(firsts[0], firsts[1])
    fit(wrapped, (x, x[:, :1] ** 2), epochs=2, progress=False, standardize=False)
    for voter in wrapped.voters():
        parameters = dict(voter.named_parameters())
        assert all(torch.equal(parameters[name], value) for name, value in frozen.items())
    answers = torch.stack([voter(x) for voter in wrapped.voters()])
    y, risk = wrapped(x, return_risk=True)
    torch.testing.assert_close(y, answers.mean(0))
    torch.testing.assert_close(risk, answers.std(0, correction=0))
    assert risk.min() > 0


def test_a_part_of_an_adapter_that_could_not_vote_alone_is_told():
    with pytest.warns(WorkbenchWarning, match="larger share="):  # the last layer is lora_B alone, which is zero
        vote.Wrapper(3, share=1)(lora("layers"))
    with pytest.raises(ValueError, match="share=2"):  # the last layer is the frozen base
        vote.Wrapper(3, share=1)(lora("parameters"))


@pytest.mark.parametrize("options", [{"share": 1}, {"share": "rank1"}, {}, {"finetune": True}, {"use_bias": False}])
def test_frozen_layers_are_the_given_ones_in_every_voter(options):
    model = net()
    for place in (0, 3) if options.get("share") == 1 else (0, 5):
        model[place].requires_grad_(False)
    wrapped = vote.Wrapper(3, **options)(model)
    for voter in wrapped.voters():
        for (name, parameter), original in zip(voter.named_parameters(), model.parameters(), strict=True):
            assert original.requires_grad or torch.equal(parameter, original), name
            assert parameter.requires_grad == original.requires_grad or not original.requires_grad


@pytest.mark.parametrize(
    ("wrapper", "frozen", "says"),
    [
        (vote.Wrapper(3, share=1), ["5"], r"5\.weight.*model\.5\.weight\.requires_grad_\(True\).*share=2"),
        (vote.Wrapper(3, share=2, finetune=True), ["5", "3"], "share=3"),
        (vote.Wrapper(3), ["0", "1", "3", "5"], "all parameters that would vote are frozen"),
        (vote.Wrapper(3, share="rank1"), ["0", "1", "3", "5"], "all parameters that would vote are frozen"),
        (snapshot.Wrapper(3), ["0", "1", "3", "5"], "frozen"),
        (swag.Wrapper(3), ["0", "1", "3", "5"], "frozen"),
    ],
)
def test_where_all_that_would_differ_is_frozen_the_remedy_is_told(wrapper, frozen, says):
    model = net()
    for path in frozen:
        model.get_submodule(path).requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=says):
        wrapper(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_biases_alone_may_vote_and_must_if_nothing_else_learns():
    model = net()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    wrapped = vote.Wrapper(3)(model)
    assert all(torch.equal(voter[5].weight, model[5].weight) for voter in wrapped.voters())
    assert not torch.equal(*[voter[5].bias for voter in wrapped.voters()[:2]])
    with pytest.raises(ValueError, match="frozen"):
        vote.Wrapper(3, use_bias=False)(model)


class Residual(nn.Module):
    """A block whose last scale or convolution is zero, so that it starts as the identity."""

    def __init__(self, last):
        super().__init__()
        self.conv, self.last, self.head = nn.Conv1d(4, 4, 1), last, nn.Linear(4, 1)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x):
        return self.head((x + self.last(self.conv(x))).mean(-1))


@pytest.mark.parametrize("last", [lambda: nn.BatchNorm1d(4), lambda: nn.Conv1d(4, 4, 1)])
def test_residual_branches_that_start_at_zero_do_so_in_every_voter(last):
    torch.manual_seed(0)
    x, wrapped = torch.randn(16, 4, 3), vote.Wrapper(3)(Residual(last()))
    for voter in wrapped.voters():
        torch.testing.assert_close(voter(x), voter.head(x.mean(-1)))
    fit(wrapped, (x, x[:, :1, 0]), epochs=1, progress=False, standardize=False)
    scales = [voter.last.weight for voter in wrapped.voters()]
    assert not torch.allclose(scales[0], scales[1])


def test_a_zero_head_is_drawn_where_nothing_else_could_differ():
    model = net()
    nn.init.zeros_(model[5].weight), nn.init.zeros_(model[5].bias)
    wrapped = vote.Wrapper(3, share=1)(model)
    assert wrapped(torch.randn(4, 2), return_risk=True)[1].min() > 0


def test_the_risk_head_of_a_frozen_head_learns_beside_it():
    model, x = net(), torch.randn(64, 2)
    model.requires_grad_(False)
    wrapped = compose(sculpt.Wrapper(n_layers=1))(model)
    before, risk_parameters = wrapped.eval()(x), dict(wrapped.named_risk_parameters())
    start = {name: p.detach().clone() for name, p in risk_parameters.items()}
    fit(wrapped, (x, torch.randn(64, 1)), epochs=2, progress=False, standardize=False)
    torch.testing.assert_close(wrapped.unwrap().eval()[5].weight, model[5].weight)
    assert before.shape == (64, 1)
    assert all(not torch.equal(risk_parameters[name], value) for name, value in start.items())
