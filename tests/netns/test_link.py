"""Compares step time and bytes of the emulated Link with real ports. Needs root and about a minute."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.bench.netns import Cell, Ranks, awake, cells, excess, in_words, ratio, step
from tests.network import Network, sweep, why_not

pytestmark = pytest.mark.netns
SIZE, STEPS = 4, 8


class Both(NamedTuple):
    """The same processes on real ports and on the loopback, and the real ports' traffic without payload."""

    real: Ranks
    modelled: Ranks
    control: list[dict[str, Any]]

    def measured(self, cell: Cell, link: float = 0.0) -> dict[str, Any]:
        """Runs `cell` on real ports, and on an emulated Link of the same bandwidth or of `link` Mbit/s."""
        modelled = self.modelled.run(replace(cell, real=False, mbit=link or cell.mbit))
        return {
            "cell": vars(cell),
            "ranks": SIZE,
            "frame": self.real.network.frame,
            "real": self.real.run(cell),
            "modelled": modelled,
            "control": self.control,
        }


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    if reason := why_not():
        pytest.skip(reason)
    with awake(), Network(SIZE) as network, Ranks(SIZE, network) as real, Ranks(SIZE) as modelled:
        yield Both(real, modelled, real.run(Cell(mbit=50, width=1, layers=1, bucket_mb=0.26, pace=10, steps=STEPS)))


@pytest.mark.parametrize("cell", cells(50, 200, 1000, steps=STEPS), ids=lambda c: f"{c.mbit} Mbit/s, {c.bucket_mb} MB")
def test_paced_ddp_takes_as_long_on_the_link_as_on_a_network_and_sends_as_many_bytes(both: Both, cell: Cell) -> None:
    """The times agree within 10 %; headers add at most 5 %.

    The test repeats the measurement if other processes took the cores. Other load only makes steps longer, so the test
    compares the shortest step of each side.
    """
    tries: list[dict[str, Any]] = []
    for _ in range(5):
        tries.append(both.measured(cell))
        modelled, real = (min(step(found[side]) for found in tries) for side in ("modelled", "real"))
        if abs(modelled / real - 1) <= 0.1:
            break
    said = "; ".join(map(in_words, tries))
    assert abs(modelled / real - 1) <= 0.1, said
    assert all(0 <= share <= 0.05 for share in excess(tries[-1])), said


def test_a_link_of_another_bandwidth_takes_a_different_time(both: Both) -> None:
    found = both.measured(cells(50, steps=STEPS)[0], link=75)
    assert ratio(found) < 0.85, in_words(found)


def test_nothing_is_left_of_a_network_even_if_its_process_is_killed(both: Both) -> None:
    with pytest.raises(KeyError), Network(2) as network:
        assert set(network.names) < namespaces()
        raise KeyError
    assert not namespaces() & {*network.names, network.switch}
    left = f"workbench-{2**22 + 1}-left"  # no process has this id
    subprocess.run(["ip", "netns", "add", left], check=True)
    sweep()
    assert left not in namespaces() and set(both.real.network.names) < namespaces()


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}
