"""Generated texts of two prompts by three voters, with tokens that a page must escape and non-finite numbers."""

from __future__ import annotations

import math

import torch

from workbench.risk import Risk
from workbench.text import Generation

WORDS = [
    *("The", " answer", " is", " 42", ".", "\n", "\r\n", "", " ", "\t", "\u202egnp", "😀"),
    *(
        "<img src=x onerror=\"document.title='bad'\">",
        "</script><script>document.title='bad'</script>",
        "\"&'",
        "' autofocus x='",
    ),
]
WORDS += [f" word{i}" for i in range(40)]


def hostile(members: int = 3) -> Generation:
    """Return a text of all words above and one of five words; the second word has no finite risk."""
    n, steps, k = 2, len(WORDS), 3
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(members, n, steps, len(WORDS), generator=generator, dtype=torch.float64).pow(12)
    probs = probs / probs.sum(-1, keepdim=True)
    mean = probs.mean(0)
    tokens = torch.arange(steps).expand(n, -1).clone()
    mask = torch.ones(n, steps, dtype=torch.bool)
    mask[1, 5:] = False
    at = tokens[..., None]
    best = mean.topk(k, -1)
    total, aleatoric = torch.special.entr(mean).sum(-1), torch.special.entr(probs).sum(-1).mean(0)
    total[0, 1] = math.nan
    logs = mean.gather(-1, at)[..., 0].log()
    logs[0, 1] = -math.inf
    return Generation(
        sequences=tokens,
        tokens=tokens,
        mask=mask,
        log_probs=logs,
        member_log_probs=probs.gather(-1, at.expand(members, -1, -1, -1))[..., 0].log(),
        risk=Risk(total=total, aleatoric=aleatoric, epistemic=total - aleatoric),
        alternatives=best.indices,
        alternative_probs=best.values,
        words=lambda some: [WORDS[i] for i in some.tolist()],
        member_alternative_probs=probs.gather(-1, best.indices.expand(members, -1, -1, -1)),
    )
