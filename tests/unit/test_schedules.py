"""Schedules of pipelines: that each can run, and that its docstring draws what it does."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.ranks import shipped
from workbench.partitions.schedules import Action, GPipe, Interleaved, OneFOneB, Schedule, ZeroBubble

SCHEDULES = list(shipped(Schedule).values())


def drawn(schedule: Schedule, stages: int, micros: int) -> list[list[str]]:
    """By stage what it computes in each slot of time, "." where it waits; passes take a slot, messages no time."""
    todo = [schedule.actions(stage, stages, micros) for stage in range(stages)]
    done: dict[tuple[str, int, int], int] = {}  # by pass, micro-batch and piece of the model: when
    rows: list[list[str]] = [[] for _ in range(stages)]
    pieces = schedule.pieces * stages
    for slot in range(8 * schedule.pieces * (micros + stages)):
        if not any(todo):
            return rows
        for stage, row in enumerate(rows):
            row.append(".")
            if todo[stage]:
                what, micro, chunk = todo[stage][0]
                piece = chunk * stages + stage
                needs = what, micro, piece - 1 if what == "F" else piece + 1 if what in "BI" else -1
                if not 0 <= needs[2] < pieces or done.get(needs, slot) < slot:
                    row[-1] = str(todo[stage].pop(0))
                    done[what, micro, piece] = slot
    raise AssertionError(f"{schedule}: stages wait for each other for ever: {todo}")


@pytest.mark.parametrize("cls", SCHEDULES)
@pytest.mark.parametrize(("stages", "micros"), [(2, 1), (2, 4), (3, 4), (4, 2), (4, 16), (7, 5), (4, 4), (3, 9)])
def test_every_micro_batch_goes_forward_and_back_once_and_nobody_waits_for_ever(
    cls: type[Schedule], stages: int, micros: int
) -> None:
    schedule = cls()
    if schedule.refuses(stages, micros):
        return
    for stage, row in enumerate(drawn(schedule, stages, micros)):
        passes = [cell for cell in row if cell != "."]
        kinds, back = ("FIW", "I") if schedule.halves else ("FB", "B")
        every = [str(Action(what, m, c)) for what in kinds for m in range(micros) for c in range(schedule.pieces)]
        assert sorted(passes) == sorted(every), stage
        assert all(passes.index(f"F{cell[1:]}") < passes.index(cell) for cell in passes if cell[0] == back)
        assert all(passes.index(f"I{cell[1:]}") < passes.index(cell) for cell in passes if cell[0] == "W")
        for chunk in range(schedule.pieces):
            backs = [str(Action(kinds[-1], m, chunk)) for m in range(micros)]
            assert [cell for cell in passes if cell in backs] == backs, "gradients add up in the micro-batches' order"


@pytest.mark.parametrize(("stages", "micros", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 4, 3), (2, 2, 4)])
def test_more_pieces_make_the_bubble_smaller(stages: int, micros: int, chunks: int) -> None:
    rows = drawn(Interleaved(chunks=chunks), stages, micros)
    assert len(rows[0]) == 2 * (chunks * micros + stages - 1)
    most = now = 0
    for what, *_ in Interleaved(chunks=chunks).actions(0, stages, micros):
        now += 1 if what == "F" else -1
        most = max(most, now)
    assert most == min(chunks * micros, 2 * (stages - 1) + (chunks - 1) * stages + 1)


@pytest.mark.parametrize("cls", [GPipe, OneFOneB])
@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (4, 3)])
def test_the_bubble_is_that_of_the_papers(cls: type[Schedule], stages: int, micros: int) -> None:
    rows = drawn(cls(), stages, micros)
    assert len(rows[0]) == 2 * (micros + stages - 1)


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (4, 4), (8, 32)])
def test_zb_h1_loses_a_third_and_keeps_no_more_than_1f1bs_first_stage(stages: int, micros: int) -> None:
    rows = drawn(ZeroBubble(), stages, micros)
    assert len(rows[0]) == 3 * micros + stages - 1
    for stage in range(stages):
        now, most = 0, 0
        for what, *_ in ZeroBubble().actions(stage, stages, micros):
            now += {"F": 1, "I": 0, "W": -1}[what]
            most = max(most, now)
        assert most == min(micros, stages)


@pytest.mark.parametrize("cls", SCHEDULES)
def test_the_docstring_draws_it(cls: type[Schedule]) -> None:
    lines = re.findall(r"^ *stage (\d) +(.*)$", inspect.getdoc(cls) or "", flags=re.M)
    shown = [row.split() for _, row in lines]
    micros = max(int(re.findall(r"\d+", cell)[0]) for row in shown for cell in row if cell != ".") + 1
    assert shown == drawn(cls(), len(shown), micros)
