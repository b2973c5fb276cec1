"""Findings about a model: their kinds, why each matters, what it means for each role of a wrapper, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from ..introspect.locations import NOWHERE, Location

# from best to worst; "not run" is not part of this order
VERDICTS = ("ok", "needs settings", "note", "slower", "refused")
HARMLESS = ("ok", "needs settings")  # not a flaw of the model


class Role(Enum):
    """What a wrapper does, as far as findings depend on it; a wrapper has the roles of its methods."""

    ANY = "wraps a model"
    BRANCHES = "runs the model in several branches"
    MEMBERS = "branches are whole models, which differ in their trainable parameters"
    DEALS = "deals out the rows of a batch in training"
    OWN_PASS = "observes the model in a pass of its own, and gives one risk per row"


Means = Mapping[Role | str, str]  # verdicts by role, or by the name of a wrapper, which takes precedence


class FindingKind(NamedTuple):
    """One kind of finding.

    Args:
        title: short description.
        why: its effect on a wrapped model.
        remedy: what to do.
        means: verdicts by the role of a wrapper, "ok" for all others; "slower" and "refused" are expectations that trying the wrappers
            confirms or corrects.
    """

    title: str
    why: str
    remedy: str
    means: Means


_ALL_OK: Means = {}
_NOT_RUN: Means = {Role.ANY: "not run"}
_REFUSED_BY_ALL: Means = {Role.ANY: "refused"}
_NOTE_FOR_ALL: Means = {Role.ANY: "note"}
_SLOWER: Means = {Role.BRANCHES: "slower"}
_NOTE_FOR_BRANCHES: Means = {Role.BRANCHES: "note"}
_NOTE_FOR_MEMBERS: Means = {Role.MEMBERS: "note"}
_ONE_BY_ONE = (
    "One pass for all branches (vmap) is not possible, so each voter, sample or risk head is a pass of its own."
)

KINDS: dict[str, FindingKind] = {
    "error": FindingKind(
        "the model raises an error",
        "The error is the model's own: wrapped, it raises the same.",
        "call model(...) with these inputs until it runs, then diagnose again",
        _NOT_RUN,
    ),
    "refused": FindingKind("a wrapper refuses the model", "", "see the message, or use another wrapper", _ALL_OK),
    "lazy": FindingKind(
        "parameters without a shape yet",
        "Parameters without values can't be shared or multiplied.",
        "call the model once with real inputs before wrapping it",
        _REFUSED_BY_ALL,
    ),
    "scripted": FindingKind(
        "scripted code (torch.jit)",
        "Scripted code can't be run with other parameters.",
        "wrap the model before scripting it",
        _REFUSED_BY_ALL,
    ),
    "wrapped": FindingKind(
        "wrapped already",
        "Each method can be on a model only once.",
        "wrap the plain model, workbench.unwrap(model), or add other methods",
        _ALL_OK,
    ),
    "wrapped_part": FindingKind(
        "a part is wrapped",
        "Wrappers work on whole models.",
        "put the plain part back (workbench.unwrap) and wrap the whole with compose(...)",
        _REFUSED_BY_ALL,
    ),
    "no_parameters": FindingKind(
        "no floating-point parameters",
        "There is nothing to wrap.",
        "assign layers to attributes of the module (or keep them in an nn.ModuleList), so that they are registered",
        _REFUSED_BY_ALL,
    ),
    "unregistered": FindingKind(
        "tensors that are not registered",
        "They are not moved, saved or trained, and all branches share them.",
        "self.register_buffer(name, tensor), or an nn.Parameter (in lists: nn.ParameterList) if it is to be trained",
        _NOTE_FOR_ALL,
    ),
    "grows": FindingKind(
        "a container grows with every call",
        "Each branch has its own, and continues with it in the next call; the model shows that of the first branch. Memory grows.",
        "keep the values outside of forward, or keep only the last one",
        _NOTE_FOR_BRANCHES,
    ),
    "state": FindingKind(
        "forward changes attributes, or objects in them",
        "Each branch has its own, and continues with it in the next call (a cache, a count); the model shows that of the first branch. If "
        "vote deals out rows in training, a voter gets other rows in the next call.",
        "nothing, if it is intended; register a buffer for it if it is to be saved with the model; train with tile_and_reduce=True if it "
        "belongs to rows",
        _NOTE_FOR_BRANCHES,
    ),
    "buffers": FindingKind(
        "forward writes buffers",
        "Each branch works on a copy, and the copies are merged once per call; each voter keeps its own.",
        "nothing, if they are running statistics",
        _NOTE_FOR_BRANCHES,
    ),
    "input_write": FindingKind(
        "forward writes into its inputs",
        f"The caller's tensor changes, with and without a wrapper. {_ONE_BY_ONE}",
        "work on a copy: x = x.clone(), or x = x * 2 instead of x.mul_(2)",
        _SLOWER,
    ),
    "global_write": FindingKind(
        "forward writes what lies outside of the model",
        "It is written once for each branch, and the value of the last branch stays.",
        "return it, or keep it in an attribute of the model",
        _SLOWER,
    ),
    "randomness": FindingKind(
        "random numbers that torch.manual_seed does not control",
        "Seeding torch does not repeat them, and they do not follow the model to its device.",
        "draw with torch functions from torch's global generator",
        _NOTE_FOR_BRANCHES,
    ),
    "random_eval": FindingKind(
        "random numbers in evaluation mode",
        "Two calls on the same input differ, and the spread of branches contains this noise.",
        "draw only `if self.training`, and pass training=self.training to functions such as F.dropout, unless it is intended",
        _NOTE_FOR_ALL,
    ),
    "control_flow": FindingKind(
        "control flow depends on values",
        f"Branches may take different paths. {_ONE_BY_ONE}",
        "compute both and choose: torch.where(condition, a, b)",
        _SLOWER,
    ),
    "item": FindingKind(
        "values are taken out of tensors",
        f"A Python number is the same for all branches, and has no gradient. {_ONE_BY_ONE}",
        "compute with tensors",
        _SLOWER,
    ),
    "dynamic_shape": FindingKind(
        "shapes depend on values",
        f"Each branch may select a different number of elements. {_ONE_BY_ONE}",
        "keep the shape: torch.where(mask, a, b), or multiply by the mask",
        _SLOWER,
    ),
    "autograd": FindingKind(
        "derivatives are taken in forward",
        "They are taken in each branch.",
        "use torch.func.grad, which works under vmap, or leave it as it is",
        _SLOWER,
    ),
    "checkpoint": FindingKind(
        "activation checkpointing",
        f"Parts run again in the backward pass, where noise on activations can't be drawn again. {_ONE_BY_ONE}",
        'switch it off if memory allows; sample.Wrapper(where="weights") works with it',
        _SLOWER,
    ),
    "vmap": FindingKind(
        "one pass for all branches is not possible", _ONE_BY_ONE, "rewrite this line if speed matters", _SLOWER
    ),
    "compiled": FindingKind(
        "compiled (torch.compile)",
        "Wrapped, it runs uncompiled.",
        "compile the wrapped model: torch.compile(wrapped)",
        _NOTE_FOR_ALL,
    ),
    "batch_mixing": FindingKind(
        "rows depend on other rows",
        "Rows can't be dealt out to voters in training: each step trains all voters on the whole batch.",
        "nothing, if it is intended (graphs, contrastive models); otherwise reduce over other axes than the first",
        {Role.DEALS: "note"},
    ),
    "no_rows": FindingKind(
        "no row for each row of the input",
        "Rows can't be dealt out to voters in training: each step trains all voters on the whole batch. A wrapper that gives one risk per "
        "row (neo) needs rows.",
        "return one row for each row of the input, and reduce outside of the model",
        {Role.DEALS: "note", Role.OWN_PASS: "refused"},
    ),
    "integer_output": FindingKind(
        "the output has whole numbers",
        "They have no risk; the majority of the voters or samples decides.",
        "return the scores, and do argmax, rounding or decoding outside of the wrapped model",
        _REFUSED_BY_ALL,
    ),
    "probabilities": FindingKind(
        "the output is squashed to probabilities",
        "Its risk would be that of a plain value, and sculpt's risk head is squashed, too.",
        'return logits and wrap with output="logits", or keep it and wrap with output="probs"',
        _NOTE_FOR_BRANCHES,
    ),
    "non_tensor_output": FindingKind(
        "a part of the output is no tensor",
        "The first branch's is returned. If the caller passes an object back unchanged, such as a cache, each branch continues with its own. "
        "Plain numbers and strings must be equal in all branches.",
        "return it as a tensor if it is a number; name it in state=... if the caller passes it on (a cache), or leave it out (use_cache=False)",
        _NOTE_FOR_BRANCHES,
    ),
    "no_gradient": FindingKind(
        "no gradient reaches a parameter from the output",
        "Nothing can be trained through the wrapped model.",
        "remove torch.no_grad, .detach(), .data or .item() on the way to the output",
        _NOTE_FOR_ALL,
    ),
    "unused": FindingKind(
        "parameters that no output depends on",
        "Nothing trains them, and voters do not differ in them.",
        "remove them, or find out why their layers do not run or are detached",
        _NOTE_FOR_MEMBERS,
    ),
    "frozen": FindingKind(
        "frozen parameters",
        "Voters share them; if everything that would vote is frozen, vote refuses.",
        "requires_grad_(True) before wrapping, if voters are to differ there",
        _NOTE_FOR_MEMBERS,
    ),
    "hooks": FindingKind(
        "hooks on modules",
        "They run once for each branch, and keep the branches from running in one pass (vmap).",
        "nothing, if they do not count calls; hooks set on the wrapped model run once per call",
        _SLOWER,
    ),
    "tied": FindingKind(
        "tied parameters",
        "They stay tied, in each voter.",
        "nothing",
        _ALL_OK,
    ),
}


@dataclass(frozen=True)
class Finding:
    """One property of a model that affects wrapping it.

    Args:
        kind: a key of `KINDS`.
        where: path of the module, or the name of the class for the model itself.
        line: "file.py:12", "" if no line of the user's code is involved.
        what: what was found there.
        means: by wrapper "ok", "note" (works, but read this), "slower" (a pass for each branch), "refused", "needs settings" or "not run"; by
            role before `for_wrappers` converts it.
        remedy: what to do.
        code: the source of the line, "" if there is none.
    """

    kind: str
    where: str
    line: str
    what: str
    means: Mapping[Any, str] = field(hash=False)
    remedy: str
    code: str = ""


def make_finding(
    kind: str,
    where: str,
    what: str = "",
    location: Location = NOWHERE,
    remedy: str = "",
    means: Means | None = None,
) -> Finding:
    """Return a finding, with the defaults of its kind for what is not given.

    Args:
        kind, what: see `Finding`.
        where: path of the module or name of the model, used if the location has no path.
        location: line of the user's code.
        remedy, means: override those of the kind; roles missing from `means` keep theirs.
    """
    return Finding(
        kind,
        location.path or where,
        location.line,
        what,
        MappingProxyType({**KINDS[kind].means, **(means or {})}),
        remedy or KINDS[kind].remedy,
        location.code,
    )


def for_wrappers(finding: Finding, roles: Mapping[str, frozenset[Role]]) -> Finding:
    """Return the same finding with a verdict for each wrapper: the one given by its name, else the worst of its roles.

    Args:
        finding: with meanings by role.
        roles: of each wrapper.
    """
    means = {}
    for name, members in roles.items():
        of_roles = [verdict for role, verdict in finding.means.items() if role in members]
        means[name] = finding.means.get(name) or max(of_roles, key=rank, default="ok")
    return replace(finding, means=MappingProxyType(means))


def rank(verdict: str) -> int:
    """Return how bad a verdict is: its index from best to worst, with "not run" last."""
    return VERDICTS.index(verdict) if verdict in VERDICTS else len(VERDICTS)
