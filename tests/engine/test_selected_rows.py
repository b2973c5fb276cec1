"""Outputs whose rows the model selects are refused, even if their counts agree; models that select inside are right."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from workbench import compose, sculpt, vote
from workbench.engine.selections import RowTracker
from workbench.errors import OutputShapeError
from workbench.outputs import Detections


def suppressed(boxes, scores):
    order, keep = scores.argsort(descending=True), []
    while order.numel():
        best, order = order[0], order[1:]
        keep.append(best)
        order = order[(boxes[order] - boxes[best]).abs().amax(-1) > 0.5]
    return torch.stack(keep)


def in_python(boxes, scores):
    order, keep = scores.argsort(descending=True).tolist(), []
    while order:
        best = order.pop(0)
        keep.append(best)
        order = [i for i in order if float((boxes[i] - boxes[best]).abs().max()) > 0.5]
    return keep


# x [n, 4], scores [n] -> rows that are chosen by the scores
SELECTED = {
    "mask": lambda x, s: x[s > s.median()],
    "mask of what is computed": lambda x, s: (2 * x.tanh() + s[:, None])[s > s.median()],
    "mask then layers": lambda x, s: F.linear(x[s > s.median()], torch.ones(3, 4)).relu().unsqueeze(0),
    "mask in a tuple": lambda x, s: x[s > s.median(), :2],
    "masked_select": lambda x, s: torch.masked_select(x, (s > s.median())[:, None]),
    "nonzero": lambda x, s: x[(s > s.median()).nonzero().squeeze(1)],
    "where": lambda x, s: x[torch.where(s > s.median())[0]],
    "topk and index": lambda x, s: x[s.topk(3).indices],
    "topk and index_select": lambda x, s: x.index_select(0, s.topk(3)[1]),
    "topk and gather": lambda x, s: x.gather(0, s.topk(3).indices[:, None].expand(-1, 4)),
    "batched gather": lambda x, s: x.view(2, -1, 4).gather(
        1, s.view(2, -1).topk(3).indices[..., None].expand(-1, -1, 4)
    ),
    "take_along_dim": lambda x, s: torch.take_along_dim(x, s.argsort()[:, None], 0),
    "argsort": lambda x, s: x[s.argsort(descending=True)][:3],
    "sort": lambda x, s: torch.stack([x[i] for i in s.sort().indices]),
    "mask then topk": lambda x, s: x[s > s.median()][s[s > s.median()].topk(2).indices],
    "ranks one by one": lambda x, s: torch.stack(
        [x[i] for i in (s.topk(3).indices.select(0, rank) for rank in range(3))]
    ),
    "ranks gathered one by one": lambda x, s: torch.cat(
        [x.gather(0, s.topk(3).indices[rank : rank + 1, None].expand(-1, 4)) for rank in range(3)]
    ),
    "two ranks": lambda x, s: x.view(2, -1, 4).gather(1, s.view(2, -1).topk(3).indices[:, 1:, None].expand(-1, -1, 4)),
    "a list of numbers": lambda x, s: x[s.argsort()[:3].tolist()],
    "a tensor of numbers": lambda x, s: x[torch.tensor(s.argsort()[:3].tolist())],
    "rows picked one by one": lambda x, s: torch.stack([x[i] for i in s.argsort()[:3].tolist()]),
    "suppression": lambda x, s: x[suppressed(x.detach(), s)][:2],
    "suppression in Python": lambda x, s: x[in_python(x, s)][:2],
    "cat": lambda x, s: torch.cat([x[:1], x[s > s.median()]]),
    "chunks": lambda x, s: x[s.argsort()].chunk(2)[0].clone().reshape(-1),
}
# the same, with an answer that has a meaning for each row
RIGHT = {
    "masked_fill": lambda x, s: x.masked_fill((s > 0)[:, None], 0.5),
    "where with values": lambda x, s: torch.where((s > 0)[:, None], x, -x),
    "assignment": lambda x, s: _assigned(x, s),
    "lookup by argmin": lambda x, s: x[:3][(s[:, None] - x[:3, 0]).abs().argmin(1)],
    "embedding by argmax": lambda x, s: F.embedding((x * s[:, None]).argmax(1), torch.eye(4)),
    "topk and mean": lambda x, s: x[s.topk(3).indices].mean(0),
    "topk and weights": lambda x, s: (s.topk(3).values.softmax(0)[:, None] * x[s.topk(3).indices]).sum(0),
    "mask and sum": lambda x, s: x[s > 0].sum(0) + s.sum(),
    "neighbours": lambda x, s: (x * s[:, None])[torch.cdist(x * s[:, None], x).topk(3).indices].amax(1),
    "neighbours by gather": lambda x, s: _neighbours(x, s),
    "experts": lambda x, s: _experts(x, s),
    "experts in order": lambda x, s: _experts_in_order(x, s),
    "shifts by rank": lambda x, s: _shifted(x, s),
    "the second best": lambda x, s: x.view(2, -1, 4).gather(
        1, s.view(2, -1).argsort()[:, -2:-1, None].expand(-1, -1, 4)
    ),
    "sorted and put back": lambda x, s: (x[s.argsort()] * 2)[s.argsort().argsort()] + s[:, None],
    "a mask by rank": lambda x, s: torch.tensor([0.0] * 4 + [1.0] * 4).gather(0, s.argsort().argsort()) + 0 * s,
    "scattered back": lambda x, s: (
        torch.zeros_like(x).index_add(0, s.topk(3).indices, x[s.topk(3).indices]) + s[:, None]
    ),
    "dropped tokens, restored": lambda x, s: _restored(x, s),
    "the first token of the kept": lambda x, s: torch.cat([s.mean().expand(1, 4), x[s.topk(3).indices]])[0],
    "the best scores": lambda x, s: s.topk(3).values,
    "sorted scores": lambda x, s: s.sort().values,
    "a mask of the inputs": lambda x, s: (x * s[:, None])[x[:, 0] > 0],
    "a mask of the inputs, packed": lambda x, s: (x * s[:, None])[(x[:, 0] > 0).nonzero().squeeze(1)].cumsum(0),
    "order of the inputs": lambda x, s: (x * s[:, None])[x[:, 0].argsort()],
    "best row": lambda x, s: x[:, :1].amax() * s,
    "products over the kept": lambda x, s: (s[:, None] * x)[:3] @ x[s.topk(4).indices].T @ x[s.topk(4).indices],
    "attention to the kept": lambda x, s: F.scaled_dot_product_attention(
        (x * s[:, None])[None], x[s.topk(3).indices][None], x[s.topk(3).indices][None]
    ),
    "tokens one by one": lambda x, s: _decoded(x, s),
    "experts by item": lambda x, s: _sorted_experts(_by_item)(x, s),
    "experts by index_copy": lambda x, s: _sorted_experts(lambda y, i: torch.zeros_like(y).index_copy(0, i, y))(x, s),
    "experts by index_add": lambda x, s: _sorted_experts(lambda y, i: y.new_zeros(y.shape).index_add(0, i, y))(x, s),
    "experts by scatter": lambda x, s: _sorted_experts(
        lambda y, i: torch.zeros_like(y).scatter(0, i[:, None].expand_as(y), y)
    )(x, s),
}


def _assigned(x, s):
    y = x * 1
    y[s > 0] = x[s > 0] * 2 + s[s > 0][:, None]
    return y


def _neighbours(x, s):
    h = x * s[:, None]
    idx = torch.cdist(h, h).topk(3, largest=False).indices
    near = h[None].expand(len(h), -1, -1).gather(1, idx[..., None].expand(-1, -1, 4))
    return (torch.cat([near - h[:, None], near], -1) @ torch.ones(8, 2)).relu().max(1).values


def _experts(x, s):
    weights, chosen = (s[:, None] * torch.ones(4) * x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for e in range(4):
        rows, place = torch.where(chosen == e)
        out.index_add_(0, rows, (x[rows] * (e + 1)) * weights[rows, place, None])
    return out


def _experts_in_order(x, s):
    expert = (s[:, None] * x).argmax(-1)
    order = expert.argsort(stable=True)
    scaled = x[order] * (expert[order] + 1)[:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return scaled[back]


def _sorted_experts(write):
    """Sorts rows by their expert, and writes the answers back into the order of the rows."""

    def forward(x, s):
        expert = (s[:, None] * x).argmax(-1)
        order = expert.argsort(stable=True)
        parts = x[order].split(torch.bincount(expert, minlength=4).tolist())
        return write(torch.cat([part * (e + 1) for e, part in enumerate(parts)]), order)

    return forward


def _by_item(y, order):
    out = torch.empty_like(y)
    out[order] = y
    return out


def _shifted(x, s):
    x, s = x.view(2, -1, 4), s.view(2, -1)
    weights, shifts = s.topk(2)
    steps, twice = torch.arange(x.shape[1])[None, :, None].expand_as(x), x.repeat(1, 2, 1)
    shifted = [twice.gather(1, steps + shifts[:, i].view(-1, 1, 1).repeat(1, *x.shape[1:])) for i in range(2)]
    return sum(shifted[i] * weights.softmax(-1)[:, i, None, None] for i in range(2))


def _restored(x, s):
    order = s.argsort()
    kept = x[order[:4]] * 2
    return torch.cat([kept, s.mean().expand(len(x) - 4, 4)])[order.argsort()]


def _decoded(x, s):
    state, out = x[0], []
    for _ in range(4):
        state = state.tanh() + x[int((state * s[:4]).argmax())]
        out.append(state)
    return torch.stack(out)


class Scored(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.score, self.choose = nn.Linear(4, 1), choose

    def forward(self, x):
        return self.choose(x, self.score(x).squeeze(-1))


@pytest.fixture
def x():
    return torch.rand(8, 4, generator=torch.Generator().manual_seed(0)) * 4 - 2


def different_voters(choose, **options):
    torch.manual_seed(1)
    return vote.Wrapper(3, **options)(Scored(choose)).eval()


@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", SELECTED)
def test_selected_rows_are_refused_also_when_counts_agree(x, name, gradients, strategy):
    wrapped = different_voters(SELECTED[name], strategy=strategy)
    shapes = {voter.eval()(x).shape for voter in wrapped.voters()}
    with torch.set_grad_enabled(gradients), pytest.raises(OutputShapeError, match="output=Detections") as refused:
        wrapped(x)
    if len(shapes) == 1 and not name.startswith("suppression"):
        assert "test_selected_rows.py" in str(refused.value)
    with pytest.raises(OutputShapeError):
        wrapped(x, return_risk=True)


@pytest.mark.filterwarnings("ignore:the model gives whole numbers")
@pytest.mark.parametrize("name", RIGHT)
def test_what_selects_inside_is_right(x, name):
    wrapped = different_voters(RIGHT[name])
    for inputs in (x, x.flip(0)):
        expected = torch.stack([voter.eval()(inputs) for voter in wrapped.voters()])
        for _ in range(2):
            y, risk = wrapped(inputs, return_risk=True)
            assert torch.allclose(y, expected.mean(0), atol=1e-5)
            assert torch.allclose(risk, expected.std(0, correction=0), atol=1e-4)


def test_another_selection_in_a_later_call_is_seen():
    wrapped = vote.Wrapper(2, finetune=True)(Scored(lambda x, s: x[s.topk(2).indices])).eval()
    x = torch.rand(6, 4)
    assert torch.equal(wrapped(x), wrapped.voters()[0].eval()(x))
    with torch.no_grad():
        weight = next(p for name, p in wrapped.named_parameters() if "weight" in name)
        weight[1].neg_()
    with pytest.raises(OutputShapeError, match="rows that the model selects"):
        wrapped(x)


@pytest.mark.parametrize("n", [0, 1])
def test_a_first_call_with_next_to_nothing_selected_teaches_as_well(n):
    wrapped = vote.Wrapper(2, finetune=True)(Scored(lambda x, s: x[s > 0])).eval()
    with torch.no_grad():
        weight = next(p for name, p in wrapped.named_parameters() if "weight" in name)
        bias = next(p for name, p in wrapped.named_parameters() if "bias" in name)
        bias.zero_()
        weight.copy_(torch.tensor([1.0, 0, 0, 0]).expand_as(weight))
    x = torch.cat([torch.ones(n, 4), -torch.ones(3, 4)])
    assert len(wrapped(x)) == n
    with torch.no_grad():
        weight[1].copy_(torch.tensor([0, 1.0, 0, 0]).expand_as(weight[1]))
    with pytest.raises(OutputShapeError, match="rows that the model selects"):
        wrapped(torch.tensor([[1.0, -1, 0, 0], [-1, 1, 0, 0]]))


def test_risk_heads_do_not_select_for_the_model(x):
    torch.manual_seed(1)  # by chance the risk head could select the rows of the model
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Scored(lambda x, s: x[s.topk(2).indices]))
    model[2].score = nn.Linear(8, 1)
    with pytest.raises(OutputShapeError, match="rows that the model selects"):
        sculpt.Wrapper(n_layers=1)(model).eval()(x, return_risk=True)


def test_a_single_branch_selects_what_it_likes(x):
    model = Scored(lambda x, s: x[s > 0])
    assert torch.equal(compose()(copy.deepcopy(model)).eval()(x), model(x))


def test_detections_may_select_other_rows_in_each_voter(x):
    def boxes(x, s):
        some = s.sigmoid() > 0.5
        return {"boxes": torch.cat([x[some, :2], x[some, :2] + 1], 1), "scores": s.sigmoid()[some]}

    wrapped = different_voters(boxes, output=Detections(labels=None))
    counts = [len(voter(x)["scores"]) for voter in wrapped.voters()]
    assert max(counts) <= len(wrapped(x)["scores"]) <= sum(counts)


def test_models_that_select_nothing_are_followed_once(x, monkeypatch):
    wrapped = vote.Wrapper(2)(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))).eval()
    wrapped(x)
    monkeypatch.setattr(RowTracker, "__init__", None)
    wrapped(x)


class Memory:
    """An object that forward fills, as transformers' caches are."""

    def __init__(self):
        self.seen = []


class Remembering(Scored):
    def forward(self, x, memory):
        y = self.choose(x, self.score(x).squeeze(-1))
        for earlier in memory.seen:
            y = y + earlier
        memory.seen.append(y)
        return y


@pytest.mark.parametrize("choose", [_experts, _experts_in_order, _restored])
def test_an_object_that_the_first_call_fills_is_that_of_each_voter(x, choose):
    torch.manual_seed(1)
    wrapped = vote.Wrapper(3)(Remembering(choose)).eval()
    memories, memory = [Memory() for _ in range(3)], Memory()
    for inputs in (x, x.flip(0), x):
        expected = torch.stack(
            [voter.eval()(inputs, one) for voter, one in zip(wrapped.voters(), memories, strict=True)]
        )
        y, risk = wrapped(inputs, memory, return_risk=True)
        assert torch.allclose(y, expected.mean(0), atol=1e-5)
        assert torch.allclose(risk, expected.std(0, correction=0), atol=1e-5)
