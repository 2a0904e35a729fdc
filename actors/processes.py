"""Processes of engines: which one an actor is, and how it ends together with the ranks that it started.

All ends are SIGKILL: a process that is stopped, or hangs in a kernel or a collective, follows nothing politer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

# A process's start is computed from the clock of its node, which may have been set since.
_START_TOLERANCE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """A process of the cluster."""

    node: str
    """Ray's id of its node."""
    pid: int
    started_s: float
    """Wall clock. A later process that was given the same number has another."""


def own_process(node: str) -> ProcessId:
    """This process, which is on the node of that id."""
    return ProcessId(node=node, pid=os.getpid(), started_s=psutil.Process().create_time())


def end_process(process: ProcessId) -> None:
    """End a process of this node and all that it started; nothing happens if it is gone already."""
    try:
        found = psutil.Process(process.pid)
        if abs(found.create_time() - process.started_s) <= _START_TOLERANCE_S:
            end_tree(found)
    except psutil.NoSuchProcess:
        return


def end_tree(process: psutil.Process) -> None:
    """End a process and all that it started, itself last: with it goes the knowledge of who its children are."""
    for each in (*process.children(recursive=True), process):
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
