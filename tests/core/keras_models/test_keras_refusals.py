"""What cannot be right for wrapped Keras models, and is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import keras_models
from helpers.keras_models import X, Y, k, net_class, sequential, subclassed

import workbench
from workbench import augment, laplace, swag, vote

seeded_keras = keras_models.seeded_keras


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    wrapped = vote.Wrapper(2)(sequential())
    with pytest.raises(NotImplementedError, match="as_torch"):
        wrapped.export(tmp_path / "model")
    with pytest.raises(NotImplementedError, match=r"workbench\.load"):
        copy.deepcopy(wrapped)
    with pytest.raises(TypeError, match="Keras layer and no model"):
        vote.Wrapper(2)(k.layers.Dense(1))
    with pytest.raises(ValueError, match="torch module Linear"):
        vote.Wrapper(2)(k.Sequential([k.Input((4,)), k.layers.TorchModuleWrapper(torch.nn.Linear(4, 1))]))
    with pytest.raises(ValueError, match="laplace knows"):
        laplace.Wrapper()(sequential())
    with pytest.raises(ValueError, match="statistics of batch_normalization"):
        swag.Wrapper()(sequential(k.layers.BatchNormalization()))
    with pytest.raises(ValueError, match="channels_last"):
        augment.Wrapper("flip")(sequential())
    with pytest.raises(ValueError, match="whole model"):
        vote.Wrapper(2)(sequential(), at="dense")
    gathering = swag.Wrapper()(sequential())
    gathering.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"workbench\.fit\(model\.as_torch\(\)"):
        gathering.fit(X, Y)
    unbuilt = vote.Wrapper(2)(subclassed(build=False))
    with pytest.raises(RuntimeError, match="no weights yet"):
        unbuilt.as_torch()
    with pytest.raises(TypeError, match=r"give model\.as_torch\(\)"):
        workbench.fit(wrapped, (X, Y), epochs=1)
    with pytest.raises(TypeError, match="is a Keras layer"):
        vote.Wrapper(2)(torch.nn.Sequential(torch.nn.Linear(4, 4), sequential()))
    wrapped.compile("adam", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile"):
        wrapped.fit(X, Y, verbose=0)
    masking = k.Sequential([k.Input((3,)), k.layers.Embedding(4, 2, mask_zero=True), k.layers.Dense(1)])
    masking.compile("adam", "mse")
    with pytest.raises(NotImplementedError, match="masks its output"):
        vote.Wrapper(2)(masking).train_on_batch(np.ones((4, 3), "int32"), np.ones((4, 3, 1)))
    losses = k.Sequential([k.Input((4,)), k.layers.Dense(1, activity_regularizer="l2")])
    losses.compile("adam", "mse")
    with pytest.raises(NotImplementedError, match="add_loss"):
        vote.Wrapper(2)(losses).train_on_batch(X, Y)


@pytest.mark.parametrize("target", ["model", "class"])
def test_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    model = sequential() if target == "model" else net_class()
    monkeypatch.setattr(k.backend, "backend", lambda: "tensorflow")
    with pytest.raises(TypeError, match=r"on the tensorflow backend.*KERAS_BACKEND=torch"):
        vote.Wrapper(model) if target == "class" else vote.Wrapper(2)(model)
