"""Applies and records the owners' rules for a rank's state when it leaves a strategy.

Owners declare rules by name in `own`: strategies, optimizers, compressors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from workbench.experiment import Experiment
from workbench.host.core.rank_view import RankView
from workbench.host.placement.optimizer_slots import read_slots
from workbench.rank import Memory

BY_BUCKET = "by bucket"  # dicts by bucket
UNDECLARED = "undeclared"
RULE_TEXTS = {
    UNDECLARED: "was dropped, because the strategy does not declare it",
    "sum": "was sent to the ranks that it is for",
    "mean": "became the ranks' mean",
    "drop": "was dropped",
}


def list_state_names(state: object) -> set[str]:
    """Lists attributes, and buffers and parts of Memories."""
    if state is None:
        return set()
    if isinstance(state, Memory):
        return {*state.buffers, *state.parts}
    found = {BY_BUCKET} if isinstance(state, dict) and state else set()
    slotted = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in {*getattr(state, "__dict__", ()), *slotted}:
        value = getattr(state, name, None)
        found |= list_state_names(value) if isinstance(value, Memory) else {name.lstrip("_")}
    return found


def find_rule(own: Mapping[str, str], name: str) -> str:
    """Returns the rule of the exact name, else of the first fitting pattern, else ""."""
    return own.get(name) or next((said for pattern, said in own.items() if fnmatchcase(name, pattern)), "")


def report_dropped_state(
    run: RankView, was: Experiment, to: Experiment, remembered: Iterable[str], handed: bool
) -> None:
    """Records in a Mark "own" what becomes of `was.strategy`'s state. Rank 0 and servers record it.

    remembered: names of the state
    handed:     whether it includes an outer momentum for the next strategy
    """
    left, made, rank = was.strategy, run.experiment.optimizer, run.rank
    if rank.id and left.trains(rank.id, rank.size):
        return
    rules = {name: find_rule(left.own, name) or UNDECLARED for name in sorted(remembered)}
    for name, said in rules.items():
        if said == "keep" and not (handed and to.strategy.has_outer):
            rules[name] = "drop"
    text = _describe_rules(type(left).__name__, rules, type(to.strategy).__name__)
    if left.periodic and not rank.id:
        of = {name.partition("/")[0] for name in read_slots(run.layout, run.optimizer)}
        moments = {name: find_rule(made.own, name) for name in sorted(of)}
        text += _describe_rules(type(made).__name__, moments)
        rules |= moments
    if text:
        run.mark("own", {"rules": rules, "text": "; ".join(text)})


def _describe_rules(owner: str, rules: dict[str, str], to: str = "") -> list[str]:
    by = defaultdict(list)
    for name, said in rules.items():
        by[said].append(name)
    parts = [f"{', '.join(by[said])} {RULE_TEXTS.get(said, f'continues under {to}')}" for said in sorted(by)]
    return [f"state of {owner}: {'; '.join(parts)}"] if parts else []
