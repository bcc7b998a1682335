"""Holds the tables of verbs to the methods of a Rank, to the functions of families, and to both hosts."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import workbench.rank
from tests.imports import ROOT, SOURCES, list_imports, module, parse, within
from tests.ranks import experiment, run, shipped
from tests.reference import list_family_verbs, list_verb_families
from tests.sim.insides import simulated
from workbench.engine.collectives.lane import Lane
from workbench.rank import Rank
from workbench.rank.former_verbs import HOMES, find_former_verb
from workbench.rank.verbs import VERBS, Verb
from workbench.strategies import Strategy

FAMILIES: dict[str, dict[str, Verb]] = {
    name: import_module(f"workbench.strategies.{name}.verbs").VERBS for name in list_verb_families()
}
EVERY = VERBS | {verb: about for table in FAMILIES.values() for verb, about in table.items()}
ITERATED = {verb for verb, about in VERBS.items() if about.family == "iterated passes"}  # the engine's driver does them
MAKERS = ("Op", "_collective")  # each takes the verb and its arguments
OF_ENGINE = {"do"}
OF_SIMULATOR = {"reach", "together", "park", "told"}


def find_made(files: list[Path]) -> dict[str, int]:
    """Returns the verbs of the Ops that these files make, with the numbers of their arguments."""
    found = {}
    for path in files:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in MAKERS:
                if isinstance(verb := call.args[0], ast.Constant):
                    found[verb.value] = len(call.args) - 1
    return found


def test_every_method_of_a_rank_makes_an_op_of_the_table() -> None:
    found = find_made([*Path(workbench.rank.__file__).parent.glob("*.py")])
    assert found == {verb: len(about.arguments) for verb, about in VERBS.items() if about.family != "host"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_function_of_a_family_makes_an_op_of_its_table(family: str) -> None:
    table = FAMILIES[family]
    found = find_made([ROOT / "workbench" / "strategies" / family / "verbs.py"])
    assert found == {verb: len(about.arguments) for verb, about in table.items()}
    assert {about.family for about in table.values()} == {family}


def test_the_core_has_few_verbs() -> None:
    assert sum(about.family == "core" for about in VERBS.values()) <= 22


def test_no_two_tables_have_the_same_verb() -> None:
    assert len(EVERY) == len(VERBS) + sum(map(len, FAMILIES.values()))


@pytest.mark.ranks
def test_both_hosts_perform_every_verb_of_the_tables() -> None:
    e = experiment(ranks=2, steps=1, pace=1.0)
    training, virtual = run(e)[0].training, simulated(e)[1][0]
    assert training is not None
    moved = set(training.away.verbs)  # they take the whole Op
    assert set(training.host.verbs) | set(Lane.ISSUERS) | ITERATED | moved == set(EVERY) | OF_ENGINE
    assert set(virtual.host.verbs) == set(EVERY) | OF_SIMULATOR


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_familys_package_asks_its_verbs(family: str) -> None:
    package = f"workbench.strategies.{family}"
    importing = {module(p) for p in SOURCES for one in list_imports(p) if within(one.name, f"{package}.verbs")}
    assert [name for name in importing if not within(name, package)] == []
    former = {verb for verb, home in HOMES.items() if home == family}
    nodes = [(p, n) for p in SOURCES for n in ast.walk(parse(p)) if isinstance(n, ast.Attribute) and n.attr in former]
    assert [f"{module(p)}:{n.lineno}" for p, n in nodes if ast.unparse(n.value).endswith("rank")] == []


def test_strategies_ask_by_methods_of_a_rank_and_functions_of_their_family() -> None:
    """The methods are the core's. So a strategy asks the core's verbs and those of its own family, and no others."""
    files = [p for p in SOURCES if within(module(p), "workbench.strategies") and p.name != "verbs.py"]
    assert find_made(files) == {}
    for family in FAMILIES:
        home = f"workbench.strategies.{family}"
        assert any(within(cls.__module__, home) for cls in shipped(Strategy).values())


def test_former_methods_of_a_rank_are_functions_of_a_family() -> None:
    assert {verb for table in FAMILIES.values() for verb in table} == set(HOMES)
    for verb, home in HOMES.items():
        function = list_family_verbs(home)[verb]
        with pytest.warns(DeprecationWarning, match=rf"rank\.{verb}\(\.\.\.\) is {verb}\(rank, \.\.\.\)"):
            former = getattr(Rank(0, 1), verb)
        assert former.func is function and inspect.getdoc(function)
    with pytest.raises(AttributeError, match="'Rank' object has no attribute 'look_down'"):
        find_former_verb(Rank(0, 1), "look_down")
