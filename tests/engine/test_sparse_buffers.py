"""Models with a sparse buffer, such as the adjacency matrix of a graph: all branches share it as a constant."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, diagnose, fit, laplace, load, neo, sample, save, sculpt, swag, vote

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

ADJACENCY = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.3, 0.4, 0.3, 0.0], [0.0, 0.2, 0.6, 0.2], [0.0, 0.0, 0.5, 0.5]])
SPARSE: dict[str, Callable[[], Tensor]] = {"coo": ADJACENCY.to_sparse, "csr": ADJACENCY.to_sparse_csr}
WRAPPERS: dict[str, Callable[[], Any]] = {
    "vote": lambda: vote.Wrapper(3),
    "share": lambda: vote.Wrapper(3, share=1),
    "rank1": lambda: vote.Wrapper(3, share="rank1"),
    "prior": lambda: vote.Wrapper(3, prior=1.0),
    "sculpt": sculpt.Wrapper,
    "vote_sculpt": lambda: compose(vote.Wrapper(3), sculpt.Wrapper()),
    "activations": lambda: sample.Wrapper(4),
    "weights": lambda: sample.Wrapper(4, where="weights"),
    "neo": neo.Wrapper,
    "laplace": laplace.Wrapper,
    "swag": lambda: swag.Wrapper(3, start=0.5),
}


class Graph(nn.Module):
    """Network on the 4 nodes of a graph [4, 3] -> [4, 2] that changes nothing but the statistics of its norm."""

    def __init__(self, adjacency: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency, persistent=persistent)
        self.first, self.norm, self.last = nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.adjacency @ self.first(x)).tanh())


def answers(wrapped: Any, x: Tensor) -> list[Tensor]:
    """Return prediction and risks of a training and of an evaluation call, gradients, and the numbers of the norm, from fixed seeds."""
    torch.manual_seed(1)
    y, _ = wrapped.train()(x, return_risk=True)
    loss = y.sum() if wrapped.methods == ("neo",) else wrapped.loss(nn.MSELoss(), x, x[:, :2])
    loss.backward()
    torch.manual_seed(1)
    prediction, risks = wrapped.eval()(x, return_risk=True)
    gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
    norms = [buffer for name, buffer in wrapped.named_buffers() if name.startswith("norm.running")]
    risks = [risks] if isinstance(risks, Tensor) else [risks[name] for name in risks.names()]
    return [y, prediction, *risks, *gradients, *norms]


@pytest.mark.parametrize("kind", [kind for kind in WRAPPERS if kind not in ("laplace", "swag")])
@pytest.mark.parametrize("layout", SPARSE)
def test_numbers_are_those_of_a_dense_buffer(kind: str, layout: str) -> None:
    x, both = torch.randn(4, 3), []
    for adjacency in (SPARSE[layout](), ADJACENCY.clone()):
        torch.manual_seed(0)
        wrapped = WRAPPERS[kind]()(Graph(adjacency))
        both.append(answers(wrapped.fit([x]) if kind == "neo" else wrapped, x))
    torch.testing.assert_close(*both)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vote", "vote_sculpt", "neo", "laplace", "swag"])
@pytest.mark.parametrize("layout", SPARSE)
def test_fit_trains_as_with_a_dense_buffer(kind: str, layout: str) -> None:
    rows, trained = (torch.randn(24, 3), torch.randn(24, 2)), []
    for adjacency in (SPARSE[layout](), ADJACENCY.clone()):
        torch.manual_seed(0)
        wrapped = WRAPPERS[kind]()(Graph(adjacency))
        fit(wrapped, rows, validation=(rows[0][:4], rows[1][:4]), epochs=4, batch_size=4, progress=False)
        trained.append(wrapped(rows[0][:4]))
    torch.testing.assert_close(*trained, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("layout", SPARSE)
def test_copies_states_and_voters_have_their_own(layout: str, persistent: bool) -> None:
    x, plain = torch.randn(4, 3), Graph(SPARSE[layout](), persistent)
    wrapped = vote.Wrapper(3)(plain).eval()
    other = vote.Wrapper(3)(Graph(2 * SPARSE[layout](), persistent)).eval()
    other.load_state_dict(wrapped.state_dict())
    assert torch.equal(wrapped(x), other(x)) is persistent
    for model in (copy.deepcopy(wrapped), *wrapped.voters()):
        assert model.adjacency is not wrapped.adjacency
        assert torch.equal(model.adjacency.to_dense(), ADJACENCY)
    torch.testing.assert_close(wrapped(x), torch.stack([voter(x) for voter in wrapped.voters()]).mean(0))
    before = wrapped(x)
    wrapped.adjacency = 0 * SPARSE[layout]()
    assert not torch.allclose(wrapped(x), before)
    assert torch.equal(plain.adjacency.to_dense(), ADJACENCY)
    assert wrapped.double()(x.double()).dtype == torch.float64


def test_files_hold_dense_tensors_only(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"adjacency is sparse \(torch.sparse_coo\).*torch.save.*persistent=False"):
        save(vote.Wrapper(2)(Graph(ADJACENCY.to_sparse())), tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())
    x, wrapped = torch.randn(4, 3), vote.Wrapper(2)(Graph(ADJACENCY.to_sparse(), persistent=False)).eval()
    save(wrapped, tmp_path / "model.pt")
    loaded = load(tmp_path / "model.pt", Graph(ADJACENCY.to_sparse(), persistent=False)).eval()
    assert torch.equal(loaded(x), wrapped(x))


@pytest.mark.parametrize("layout", SPARSE)
def test_diagnose_runs_every_wrapper(layout: str) -> None:
    diagnosis = diagnose(Graph(SPARSE[layout]()), torch.randn(4, 3))
    assert not {"refused", "not run"} & {*diagnosis.verdicts.values()}, diagnosis


class Replacing(Graph):
    def forward(self, x: Tensor) -> Tensor:
        self.adjacency = 0.9 * self.adjacency
        return super().forward(x)


class Writing(Graph):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.adjacency.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("model", [Replacing, Writing])
@pytest.mark.parametrize("layout", SPARSE)
def test_one_that_forward_changes_is_refused(model: type[Graph], layout: str) -> None:
    plain = model(SPARSE[layout]())
    wrapped = vote.Wrapper(3)(plain).eval()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"forward of {model.__name__} changes its sparse buffer 'adjacency'"):
            wrapped(torch.randn(4, 3))
    for tensor in (plain.adjacency, wrapped.adjacency):
        assert torch.equal(tensor.to_dense(), ADJACENCY)
