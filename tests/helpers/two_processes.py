"""Run a test in two communicating processes (gloo, on the CPU)."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 2
# a process that is forked from one that has imported these starts in no time; in all else it is as new as one that is spawned
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
IMPORTED = ["torch.distributed", "torch.multiprocessing", "workbench.training", "workbench.metrics", "pytest"]


def in_two_processes(job: Any, folder: Path, *args: Any) -> None:
    """Run `job(rank, *args)` in each process of a group that meets through a file; a failing assertion in one fails the test."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(_process, (str(folder / "meeting"), job, args), WORLD, start_method=START)


def _process(rank: int, meeting: str, job: Any, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    try:
        job(rank, *args)
        gc.collect()  # frees what holds the group before the group ends; otherwise the process may abort at exit
        dist.barrier()
    finally:
        dist.destroy_process_group()
