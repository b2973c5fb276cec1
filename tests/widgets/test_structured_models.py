"""Models that return a structure of outputs, as in transformers: equal to the same models returning the scores alone; for tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import compose, fit, vote
from workbench.data import Data
from workbench.outputs import Logits
from workbench.widgets import Comparison, Explorer

pytest.importorskip("ipywidgets")


class Tagger(nn.Module):
    """Scores of two classes of sentences of five words."""

    def __init__(self, structured: bool) -> None:
        super().__init__()
        self.words, self.last, self.structured = nn.Embedding(12, 6), nn.Linear(6, 2), structured

    def forward(self, x: Tensor) -> Any:
        h = self.words(x).mean(1)
        return {"hidden": h, "logits": self.last(h)} if self.structured else self.last(h)


def sentences() -> Data:
    x = torch.randint(0, 12, (150, 5), generator=torch.Generator().manual_seed(0))
    return Data.from_arrays(x, (x < 4).sum(1).clamp(max=2) // 2, classes=["few", "many"], name="sentences")


def tagger(structured: bool) -> Tagger:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tagger(structured)


@pytest.mark.slow
def test_comparison_trains_and_measures_both_alike() -> None:
    rows = []
    for structured in (True, False):
        comparison = Comparison(tagger(structured), sentences(), ["vote(n_voters=2)", "neo"], epochs=2)
        comparison.start()
        comparison.wait()
        assert comparison.errors == {}
        rows.append(comparison.results)
    ours, expected = rows
    assert list(ours.index) == list(expected.index) == ["plain", "vote(n_voters=2)", "neo"]
    measured = ["accuracy", "nll", "ece", "error_auroc", "parameters_added"]
    torch.testing.assert_close(torch.tensor(ours[measured].values), torch.tensor(expected[measured].values))


def test_comparison_says_what_to_do_with_whole_numbers_that_are_no_tokens() -> None:
    with pytest.raises(ValueError, match=r"torch.int64 is taken for tokens: give x.float\(\) if these are values"):
        Comparison(nn.Linear(5, 2), sentences(), ["vote"], epochs=1)


def test_what_a_model_of_tokens_says_of_itself_is_shown() -> None:
    class Refusing(Tagger):
        def forward(self, x: Tensor) -> Any:
            if x.shape[1] != 7:
                raise ValueError("sentences have 7 words")
            return super().forward(x)

    with pytest.raises(ValueError, match="ValueError: sentences have 7 words"):
        Comparison(Refusing(True), sentences(), ["vote"], epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["logits", {"logits": Logits()}])
def test_training_by_any_name_of_the_scores_is_the_same(output: Any) -> None:
    ours, expected = (
        vote.Wrapper(2, output=said)(tagger(structured)) for structured, said in ((True, output), (False, "logits"))
    )
    for wrapped in (ours, expected):
        fit(wrapped, sentences(), epochs=2, progress=False)
    for ours_of, expected_of in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours_of, expected_of)


@pytest.mark.slow
def test_explorer_ranks_both_alike() -> None:
    explorers = [
        Explorer(compose(vote.Wrapper(2, output="logits"))(tagger(structured)), sentences(), by="epistemic")
        for structured in (True, False)
    ]
    ours, expected = explorers
    assert torch.equal(ours.ranked, expected.ranked)
    assert torch.equal(ours.values, expected.values)
    assert ours.widget is not None
