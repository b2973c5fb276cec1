"""Checks that run outside the graph of `torch.compile`; imported only while it traces, since it brings the compiler with it."""

from __future__ import annotations

import torch

from .feedback import refuse_means

refuse_means_outside = torch.compiler.disable(refuse_means)
