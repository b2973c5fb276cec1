"""The numbers of README and "What these risks mean, measured" are those of the tables in Benchmarks, which are made from the results."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
from conftest import ROOT

Row = dict[str, str]


@functools.cache
def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)\n", (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(section: str, **wanted: str) -> list[Row]:
    """The rows of all tables of a section, in order, whose cells are as wanted."""
    table_rows = []
    for table in re.findall(r"(?:^\|.*\n)+", sections()[section], re.MULTILINE):
        head, _, *body = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        table_rows += [dict(zip(head, cells, strict=True)) for cells in body]
    return [row for row in table_rows if all(row.get(name) == value for name, value in wanted.items())]


def numbers(table_rows: list[Row], column: str) -> list[float]:
    """The first number of each cell of a column."""
    return [float(match[0]) for row in table_rows if (match := re.search(r"-?\d+(\.\d+)?", row.get(column, "")))]


def one(section: str, column: str, **wanted: str) -> float:
    (number,) = numbers(rows(section, **wanted), column)
    return number


def short(number: float, digits: int = 2) -> str:
    return f"{number:.{digits}f}".replace("0.", ".", 1)


def span(values: list[float], digits: int = 2) -> str:
    return f"{short(min(values), digits)} to {short(max(values), digits)}"


def aleatoric() -> list[str]:
    networks = [row for row in rows("human") if row.get("network", "all eight") != "all eight"]
    from_scratch = one("human", "aleatoric", features="own", labels="people", method="vote")
    eleven = one("human", "aleatoric", features="eleven", method="vote")
    nine = rows("human", features="nine", labels="people", method="vote")
    return [
        f"within {one('toy', 'error of the noise (%)', method='sculpt', **{'training rows': '2000'})} %",
        f"networks* reach {span(numbers(networks, 'aleatoric'))}",
        f"to {short(*numbers(nine, 'aleatoric'), digits=3)} (a way",
        f"to {short(*numbers(nine, 'to people'), digits=3)} nats",
        f"reach {short(from_scratch)} alone",
        f"and {short(eleven, 3)} together with the eight",
    ]


def epistemic() -> list[str]:
    disagreement, design = rows("disentangle", method="vote"), rows("disentangle", method="vote, design alone")
    errors = numbers(design, "error")
    prior, without = rows("toy", method="vote with prior"), rows("priors", method="without a prior")
    chosen = rows("priors", method="chosen prior")
    assert numbers(design, "rE") == [0] * 9
    return [
        f"under label noise is {span(numbers(disagreement, 'rE'))}",
        f"is {span(errors[:4])} on the four sets that chose how entropy is divided and {span(errors[4:])} on five others",
        f"disagreement has {span(numbers(disagreement, 'error'))}",
        f"hold {min(numbers(prior, 'coverage, unseen (%)')):.0f} to 100 % on five curves",
        f"bands hold {min(x := numbers(without, 'coverage at the ends (%)')):.0f} to {max(x):.0f} % without a prior",
        f"Chosen scales hold {min(x := numbers(chosen, 'coverage at the ends (%)')):.0f} to {max(x):.0f} %",
    ]


def vacuitic() -> list[str]:
    single = [row for row in rows("ood_pairs") if not row["density"].startswith("auto")]
    auto, unlike = rows("ood_pairs", density="auto"), rows("ood_pairs", density="auto without like shifts")
    foreign = rows("language", method="vote", score="epistemic")
    assert len(single) == 16
    behind = "behind the best, worst"
    return [
        f"left out: {span(numbers([*single, *auto], 'near'))} by seventeen scores",
        f"better than {short(max(numbers(single, 'near')), 3)} on average",
        f"the next {short(max(numbers(single, 'mean')), 3)})",
        f"first on average ({short(*numbers(auto, 'mean'), digits=3)}",
        f"met on {auto[0]['behind by at most .01'].replace('%', ' %')}, at worst {short(*numbers(auto, behind), digits=3)} behind",
        f"still first, {short(*numbers(unlike, 'mean'), digits=3)}, but up to {short(*numbers(unlike, behind), digits=3)} behind",
        f"by neo at all ({short(one('camvid', 'unknown, AUROC', method='neo', risk='vacuitic'))})",
        f"docstrings after code at {short(numbers(foreign, 'foreign: docstrings')[0], 3)}",
    ]


def total() -> list[str]:
    (tabular,) = [row for row in rows("tables", method="tabular") if row.get("NLL, UCI: first")]
    first = {
        score: sum(int(tabular[f"{score}, {kind}: first"][0]) for kind in ("UCI", "others"))
        for score in ("NLL", "RMSE")
    }
    nll = [row for row in rows("uci") if "sample" in row][:9]
    published = numbers(nll, "best published")
    assert all(ours < best for ours, best in zip(numbers(nll, "recommended"), published, strict=True))
    assert sum(dropout > best for dropout, best in zip(numbers(nll, "sample"), published, strict=True)) == 7
    words = {4: "four", 8: "eight", 11: "eleven"}
    by_table = [row for row in rows("tables") if "epochs chosen" in row][:16]  # the table of NLL, then that of RMSE
    fewer, chosen = numbers(by_table, "tabular"), numbers(by_table, "epochs chosen")
    gains = [before - after for before, after in zip(fewer, chosen, strict=True)]
    large = [gain for gain in gains if gain > 0.01]
    assert len(by_table) == 16
    assert min(gains) > -0.01
    cost = one("tables", "processor time (s)", method="epochs chosen") / numbers([tabular], "processor time (s)")[0]
    pairs = {row["table"]: after_and_before for row, *after_and_before in zip(by_table, chosen, fewer, strict=True)}
    return [
        f"first in NLL on {words[first['NLL']]} and in RMSE on {words[first['RMSE']]}",
        f"NLL is {span(large, 3)} smaller on {words[len(large)]} of the tables",
        *(f"{name} {short(pairs[name][0])} against {short(pairs[name][1])}" for name in ("naval", "energy", "yacht")),
        f"within .01 on the others, at {words[round(cost)]} times the cost",
        "published on seven of them",
    ]


def guarantees() -> list[str]:
    split, repaired = (rows("shift", method=name)[0] for name in ("split", "adapted, weighted, quadratic"))
    online = [row for row in rows("drift") if row["intervals"] != "split"]
    fixed = rows("drift", intervals="split")
    ratios = [
        numbers([wide], "width")[0] / numbers([row], "width")[0]
        for wide in fixed
        for row in online
        if all(row[name] == wide[name] for name in ("forecaster", "trained", "RMSE"))
    ]
    coverage = numbers(online, "coverage")
    return [
        f"hold {numbers([split], 'clean')[0]} % on images",
        f"hold {numbers([split], 'worst of 12')[0]:.0f} % in the worst case",
        f"sets have {repaired['size, shifted']} classes where they had {split['size, shifted']}",
        f"keep {min(coverage)} to {max(coverage)} % with all forecasters",
        f"keeps {min(x := numbers(fixed, 'coverage'))} to {max(x)} %",
        f"up to {max(ratios):.1f} times as wide",
    ]


def costs() -> list[str]:
    on_cpu, _, on_gpu = rows("speed", wrapper="vote, all layers, n = 16")  # at batches of 64, of 1, and of 64
    last = rows("speed", wrapper="vote, last layer, n = 16")[0]
    forward = [numbers([last], model)[0] for model in ("cnn", "resnet18", "transformer", "lstm", "gpt2")]
    whole = [numbers([on_cpu], model)[0] for model in ("cnn", "transformer", "lstm")]
    words = {9: "a ninth"}
    return [
        f"take {min(forward)} to {max(forward)} times as long",
        f"whole networks {min(whole)} to {max(whole)} times",
        f"takes {1 / one('throughput', 'to the loop', method='vote'):.1f} times as long",
        f"MLPs {words[round(16 / numbers([on_gpu], 'mlp')[0])]} of 16 passes",
    ]


@pytest.mark.parametrize(
    ("page", "claims"),
    [
        ("README.md", costs),
        *(("docs/measured.md", claims) for claims in (aleatoric, epistemic, vacuitic, total, guarantees)),
    ],
)
def test_the_page_has_the_numbers_of_the_tables(page: str, claims: Callable[[], list[str]]) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert [claim for claim in claims() if claim not in text] == []
