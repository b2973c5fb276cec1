"""Files keep what modules say of the layout of their state, so that a newer layout is not taken for an older one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_files import contents, rewrite
from torch import Tensor, nn

from workbench import compose, load, save, sculpt, vote

X = torch.randn(6, 4)


class Versioned(nn.Linear):
    """Holds the square root of its scale since version 2; a state of version 1, or of none, is converted."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("root", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.root**2

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if (local_metadata.get("version") or 1) < 2 and f"{prefix}root" in state:
            state[f"{prefix}root"] = state[f"{prefix}root"].sqrt()
        super()._load_from_state_dict(state, prefix, local_metadata, *args)


class Unversioned(nn.Linear):
    """Of the first version, which it tells from a state that says nothing."""

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version") is None:
            raise RuntimeError("a state of unknown origin")
        super()._load_from_state_dict(state, prefix, local_metadata, *args)


class Observed(nn.Linear):
    """Reads its running scale itself, as observers and simulated quantization of `torch.ao.quantization` do."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(self.weight.detach().abs().max())
        return super().forward(x) / self.seen

    def _load_from_state_dict(
        self, state: Any, prefix: str, local_metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        if (key := f"{prefix}seen") in state:
            self.seen.resize_(state[key].shape)
        elif strict:
            missing.append(key)
        super()._load_from_state_dict(state, prefix, local_metadata, False, missing, *args)


def spectral() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.utils.spectral_norm(nn.Linear(3, 2)))


MAKERS: dict[str, Any] = {
    "spectral norm": spectral,
    "version 2": lambda: nn.Sequential(nn.Tanh(), Versioned()),
    "observed": lambda: nn.Sequential(nn.Tanh(), Observed()),
    "version 1": lambda: nn.Sequential(nn.Linear(4, 3), Unversioned(3, 2)),
}
WRAPPERS: dict[str, Any] = {
    "vote": vote.Wrapper(2),
    "last layer": vote.Wrapper(2, share=1),
    "sculpt": compose(vote.Wrapper(2), sculpt.Wrapper(n_layers=1)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_file_is_read_in_the_layout_that_was_saved(name: str, wrapper: str, tmp_path: Path) -> None:
    wrapped: Any = WRAPPERS[wrapper](MAKERS[name]())
    wrapped(X)  # a spectral norm learns its vectors in training mode
    expected = wrapped.eval()(X)
    voters = [voter.eval()(X) for voter in wrapped.voters()]
    torch.testing.assert_close(expected, torch.stack(voters).mean(0))
    save(wrapped, tmp_path / "model.safetensors")
    for target in (MAKERS[name](), WRAPPERS[wrapper](MAKERS[name]())):
        torch.testing.assert_close(load(tmp_path / "model.safetensors", target).eval()(X), expected)


def test_a_tensor_that_a_layer_reads_itself_is_missed_where_a_state_lacks_it() -> None:
    wrapped: Any = vote.Wrapper(2)(MAKERS["observed"]())
    state = wrapped.state_dict()
    del state["1.seen@vote"]
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.seen"):
        wrapped.load_state_dict(state)


def test_files_without_versions_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    wrapped: Any = vote.Wrapper(2)(nn.Linear(4, 2)).eval()
    save(wrapped, path)
    text, tensors = contents(path)
    del text["versions"]
    rewrite(path, text, tensors)
    torch.testing.assert_close(load(path, nn.Linear(4, 2)).eval()(X), wrapped(X))
