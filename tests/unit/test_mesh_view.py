"""Tests the picture of the mesh: every rank appears once, in the boxes of its groups."""

from __future__ import annotations

import re
from typing import Any

import pytest

from widgets.views.mesh import MAX_RANKS, Mesh
from workbench import simulate
from workbench.analysis import find_arrangement
from workbench.experiment import Experiment
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.settings import Change
from workbench.strategies import DDP, HSDP, AsyncServer, HierarchicalLocalSGD
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks


def made(ranks: int = 8, changes: tuple[Change, ...] = (), **rest: Any) -> Any:
    e = Experiment(task=ByteGPT(), ranks=ranks, steps=4, eval_every=0, pace=1.0, **rest)
    return simulate(e, changes=changes)


def picture(run: Any) -> str:
    return Mesh().update(run).html or ""


def squares(html: str) -> list[tuple[int, str]]:
    """Returns (rank, look) of every square, in the order of the page."""
    return [(int(rank), look) for look, rank in re.findall(r'wb-mesh-rank (\S+)" title="rank \d+">(\d+)<', html)]


def boxes(html: str) -> list[str]:
    return re.findall(r'wb-mesh-box"><span>([^<]+)</span>', html)


def test_boxes_are_nested_and_ranks_with_the_same_parameters_look_the_same() -> None:
    html = picture(made(partition=Pipeline(of=Tensor())))
    assert "data 2 × stage 2 × tensor 2" in html
    assert boxes(html) == ["data 0", "stage 0", "stage 1", "data 1", "stage 0", "stage 1"]
    seen = squares(html)
    assert [rank for rank, _ in seen] == list(range(8))
    looks = [look for _, look in seen]
    assert looks[:4] == looks[4:] and len(set(looks[:4])) == 4


def test_groups_of_replicas_and_servers_are_shown_too() -> None:
    for strategy in (HSDP(group=4), HierarchicalLocalSGD(group=4)):
        html = picture(made(strategy=strategy))
        assert len(boxes(html)) == 2 and len({look for _, look in squares(html)}) == 1
    html = picture(made(ranks=4, strategy=AsyncServer(servers=1)))
    assert boxes(html)[-1] == "servers" and [look for _, look in squares(html)].count("wb-mesh-server") == 1


def test_nothing_is_drawn_while_all_ranks_are_alike() -> None:
    assert picture(made()) == ""
    back = made(partition=Pipeline(stages=4), changes=(Change(2, "partition", Whole()),))
    assert picture(back) == "" and find_arrangement(back.timeline, 8).dims == (("data", 8),)
    left = made(ranks=4, strategy=AsyncServer(servers=1), changes=(Change(2, "strategy", DDP()),))
    assert picture(left) == "" and find_arrangement(left.timeline, 4).ranks == (0, 1, 2, 3)


def test_for_many_ranks_only_the_sizes_are_shown() -> None:
    html = picture(made(ranks=2 * MAX_RANKS, partition=Pipeline(stages=2)))
    assert f"data {MAX_RANKS} × stage 2" in html and squares(html) == []
