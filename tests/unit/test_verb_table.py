"""Holds the table of verbs to the methods of a Rank and to both hosts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import workbench.rank
from tests.ranks import experiment, run
from tests.sim.insides import simulated
from workbench.engine.collectives.lane import Lane
from workbench.rank.verbs import VERBS

ITERATED = {verb for verb, about in VERBS.items() if about.family == "iterated passes"}  # the engine's driver does them
MOVED = {"offload", "fetch"}
MAKERS = ("Op", "_collective", "_kept")  # each takes the verb and its arguments
OF_ENGINE = {"do"}
OF_SIMULATOR = {"reach", "together", "park", "told"}


def test_every_method_of_a_rank_makes_an_op_of_the_table() -> None:
    found = {}
    for path in Path(workbench.rank.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in MAKERS:
                if isinstance(verb := call.args[0], ast.Constant):
                    found[verb.value] = len(call.args) - 1
    for verb in MOVED:
        found[verb] -= 1  # `_kept` takes the place off the device, which it checks, as well
    assert found == {verb: len(about.arguments) for verb, about in VERBS.items() if about.family != "host"}


def test_the_core_has_few_verbs() -> None:
    assert sum(about.family == "core" for about in VERBS.values()) <= 22


@pytest.mark.ranks
def test_both_hosts_perform_every_verb_of_the_table() -> None:
    e = experiment(ranks=2, steps=1, pace=1.0)
    real, virtual = run(e)[0], simulated(e)[1][0]
    assert real.training is not None
    assert set(real.training.host.verbs) | set(Lane.ISSUERS) | ITERATED | MOVED == set(VERBS) | OF_ENGINE
    assert set(virtual.host.verbs) == set(VERBS) | OF_SIMULATOR
