"""Decides whether one replica's ranks may stand for all replicas.

Replicas act in unison if they compute alike over equal links and meet only in collectives. Then only the first
replica's ranks are simulated, in groups of full size. All its ranks are needed: slices of a stage own different shared
parameters (`TensorSplit.owners`), so they exchange different bytes.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from workbench.compressors import inside
from workbench.experiment import Experiment
from workbench.experiment.mesh_rules import make_mesh
from workbench.sim.costs.costs import Costs
from workbench.sim.costs.durations import PHASES

SIMULATE_ALL = "simulate all ranks (alike=False)"


def explain_unlike(e: Experiment, costs: Costs | None) -> str | None:
    """Returns why the first replica's ranks cannot stand for all, with a remedy; None if they can."""
    if not e.strategy.alike:
        name = type(e.strategy).__name__
        return f"strategy={name}: its ranks do different work, so one replica cannot stand for all; {SIMULATE_ALL}"
    if e.policy.decides:
        name = type(e.policy).__name__
        return f"policy={name}: it reads the measurements of every rank; take policy=None, or {SIMULATE_ALL}"
    if sided := next((type(c).__name__ for c in inside(e.compressor) if not c.alike), None):
        return f"compressor={sided}: some of its ranks send for other ranks; {SIMULATE_ALL}"
    if not e.fabric.algorithm.native:
        name = type(e.fabric.algorithm).__name__
        return f"fabric.algorithm={name}: its ranks send different messages; {SIMULATE_ALL}"
    if e.fabric.faults:
        return f"fabric.faults: ranks with faults differ from the other ranks; remove the faults, or {SIMULATE_ALL}"
    if e.fabric.path(range(e.ranks)).jitter and e.partition.depth > 1:
        return f"jitter: it changes each message between stages separately; take jitter=0, or {SIMULATE_ALL}"
    if costs is not None and any(len(getattr(costs, p)) > 1 or getattr(costs, p)[0].spread for p in PHASES):
        even = f"take costs.even(ranks={e.ranks}), or {SIMULATE_ALL}"
        return f"costs: ranks are not equally fast, or not in every step; {even}"
    sizes = list(accumulate((size for _, size in reversed(make_mesh(e.strategy, e.ranks, 0, e.partition).dims)), mul))
    if 0 < e.fabric.site < e.ranks and any(e.fabric.site % n and n % e.fabric.site for n in sizes):
        return (
            f"fabric.site={e.fabric.site}: groups of {' and '.join(map(str, sizes))} ranks are spread unevenly over "
            f"such sites; take site={sizes[0] if sizes[0] > 1 else sizes[-1]}, or {SIMULATE_ALL}"
        )
    return None
