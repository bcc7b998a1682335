"""Tests pipeline schedules: each can run, and its docstring draws its actions."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.ranks import shipped
from workbench.partitions.schedules import Action, GPipe, Interleaved, OneFOneB, PipeDream, Schedule, ZeroBubble

SCHEDULES = list(shipped(Schedule).values())


def listed(schedule: Schedule, stage: int, stages: int, micros: int, steps: int) -> list[Action]:
    """Returns a stage's actions in `steps` steps, with micro-batches numbered across batches."""
    order = [Action("F", micro) for micro in range(schedule.ahead(stage, stages))]
    for step in range(steps):
        order += [a._replace(micro=step * micros + a.micro) for a in schedule.actions(stage, stages, micros)]
    return order


def drawn(schedule: Schedule, stages: int, micros: int, steps: int = 1) -> list[list[str]]:
    """Returns by stage its action in each time slot, "." while it waits; a pass takes one slot, a message none."""
    todo = [listed(schedule, stage, stages, micros, steps) for stage in range(stages)]
    done: dict[tuple[str, int, int], int] = {}  # time by pass, micro-batch and piece of the model
    rows: list[list[str]] = [[] for _ in range(stages)]
    pieces = schedule.pieces * stages
    for slot in range(8 * schedule.pieces * (steps * micros + stages)):
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


SIZES = [(2, 1), (2, 4), (3, 4), (4, 2), (4, 16), (7, 5), (4, 4), (3, 9)]  # stages, micro-batches
FLUSH = [(cls, *s) for cls in SCHEDULES for s in SIZES if not cls().refuses(*s) and not cls().ahead(0, s[0])]


def test_schedules_refuse_only_the_sizes_that_they_cannot_order() -> None:
    names = {cls.__name__ for cls, *_ in FLUSH}
    assert names >= {"GPipe", "OneFOneB", "Interleaved", "ZeroBubble"}
    for name in names:
        whole = [s for s in SIZES if s[1] % s[0] == 0] if name == "Interleaved" else SIZES
        assert [tuple(s) for cls, *s in FLUSH if cls.__name__ == name] == whole, name


@pytest.mark.parametrize(("cls", "stages", "micros"), FLUSH)
def test_every_micro_batch_goes_forward_and_back_once_without_a_deadlock(
    cls: type[Schedule], stages: int, micros: int
) -> None:
    schedule = cls()
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
def test_the_bubble_matches_the_papers(cls: type[Schedule], stages: int, micros: int) -> None:
    rows = drawn(cls(), stages, micros)
    assert len(rows[0]) == 2 * (micros + stages - 1)


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (4, 4), (8, 32)])
def test_zb_h1_has_a_third_of_the_bubble_and_keeps_at_most_as_much_as_1f1b(stages: int, micros: int) -> None:
    rows = drawn(ZeroBubble(), stages, micros)
    assert len(rows[0]) == 3 * micros + stages - 1
    for stage in range(stages):
        now, most = 0, 0
        for what, *_ in ZeroBubble().actions(stage, stages, micros):
            now += {"F": 1, "I": 0, "W": -1}[what]
            most = max(most, now)
        assert most == min(micros, stages)


NEVER_FLUSH = [cls for cls in SCHEDULES if cls().ahead(0, 2)]


FEW = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 4), (4, 4), (4, 16)]
TAKEN = {"PipeDream": [s for s in FEW if s[1] == 1], "PipeDream2BW": [s for s in FEW if s[1] >= s[0]]}
ONGOING = [(cls, *s) for cls in NEVER_FLUSH for s in FEW if not cls().refuses(*s)]


def test_schedules_without_flushes_take_the_sizes_of_their_papers() -> None:
    assert {cls.__name__ for cls in NEVER_FLUSH} >= TAKEN.keys()
    for name, sizes in TAKEN.items():
        assert [tuple(s) for cls, *s in ONGOING if cls.__name__ == name] == sizes


@pytest.mark.parametrize(("cls", "stages", "micros"), ONGOING)
def test_a_schedule_without_flushes_is_only_idle_while_it_fills(cls: type[Schedule], stages: int, micros: int) -> None:
    """As many are in flight as stages follow, and each micro-batch goes forward and back exactly once."""
    schedule, steps = cls(), 12
    for stage, row in enumerate(drawn(schedule, stages, micros, steps)):
        passes = [cell for cell in row if cell != "."]
        forward, back = ([int(cell[1:]) for cell in passes if cell[0] == what] for what in "FB")
        assert back == list(range(steps * micros)) and forward == list(range(len(back) + stages - 1 - stage))
        first = row.index("B0")
        begun = len(row) - row[::-1].index("F" + str(forward[-1])) - 1
        assert row[:first].count(".") == stages - 1 and "." not in row[first:begun]
        now = most = 0
        for cell in passes:
            now += 1 if cell[0] == "F" else -1
            most = max(most, now)
        assert most == stages - stage


def test_pipedream_schedules_never_flush() -> None:
    assert {cls.__name__ for cls in NEVER_FLUSH} == {"PipeDream", "PipeDream2BW"}


@pytest.mark.parametrize("cls", SCHEDULES)
def test_the_docstring_draws_the_schedule(cls: type[Schedule]) -> None:
    lines = re.findall(r"^ *stage (\d) +(.*)$", inspect.getdoc(cls) or "", flags=re.M)
    shown = [row.split() for _, row in lines]
    micros = max(int(re.findall(r"\d+", cell)[0]) for row in shown for cell in row if cell != ".") + 1
    each = 1 if cls is PipeDream else 4
    found = drawn(cls(), len(shown), each, 8) if cls in NEVER_FLUSH else drawn(cls(), len(shown), micros)
    assert shown == [row[: len(shown[0])] if cls in NEVER_FLUSH else row for row in found]
