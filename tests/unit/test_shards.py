"""Tests data shards: evenly or unevenly distributed, reproducible, and without repeated examples."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import run
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, LocalSGD
from workbench.tasks import ByteGPT, Digits, TaskError
from workbench.tasks._base import shuffled
from workbench.tasks._shards import by_files, dirichlet, mixes
from workbench.tasks._source import ends, source
from workbench.tasks.byte_gpt import _filed
from workbench.tasks.digits import _images, _skewed

LABELS = torch.arange(4000) % 10


def mixed(shards: list[torch.Tensor], labels: torch.Tensor = LABELS) -> torch.Tensor:
    """Returns (ranks, labels): each rank's share of each label."""
    counts = torch.stack([torch.bincount(labels[s], minlength=10) for s in shards]).double()
    return counts / counts.sum(1, keepdim=True)


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
@pytest.mark.parametrize("alpha", [0.01, 0.5, 100.0])
def test_each_example_belongs_to_one_rank_and_shards_have_equal_size(ranks: int, alpha: float) -> None:
    shards = dirichlet(LABELS, ranks, alpha, 3)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(len(LABELS)))
    assert {len(s) for s in shards} <= {len(LABELS) // ranks, -(-len(LABELS) // ranks)}


def test_the_seed_determines_the_shards() -> None:
    first, again, other = (dirichlet(LABELS, 4, 0.5, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_large_alpha_gives_all_ranks_the_overall_mix() -> None:
    """Within the noise of drawing 1000 examples: five standard deviations of a share of 10 %."""
    uneven = torch.cat([torch.zeros(2000, dtype=torch.int64), torch.arange(2000) % 10])
    prior = torch.bincount(uneven, minlength=10) / len(uneven)
    assert (mixed(dirichlet(uneven, 4, 1e4, 0), uneven) - prior).abs().max() < 5 * (0.25 / 1000) ** 0.5


def most(shards: list[torch.Tensor]) -> torch.Tensor:
    """Returns by rank how many labels make up 90 % of its examples."""
    return (mixed(shards).sort(1, descending=True).values.cumsum(1) < 0.9).sum(1) + 1


def test_a_small_alpha_gives_a_rank_few_labels() -> None:
    """One or two labels would be enough; ranks that want the same label share it and take other examples."""
    few = torch.cat([most(dirichlet(LABELS, 10, 0.01, seed)) for seed in range(4)])
    assert few.double().mean() < 3.5 and few.min() == 1
    assert most(dirichlet(LABELS, 10, 1e4, 0)).min() >= 9


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_proportions_vary_as_in_the_dirichlet_distribution(alpha: float) -> None:
    """E q_k = p_k and Var q_k = p_k (1 - p_k) / (alpha + 1), also for an uneven prior."""
    counts = np.array([100, 200, 300, 400])
    q, p = mixes(counts, 20_000, alpha, 5), counts / 1000
    np.testing.assert_allclose(q.mean(0), p, atol=0.01)
    np.testing.assert_allclose(q.var(0), p * (1 - p) / (alpha + 1), rtol=0.06)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_shards_have_the_drawn_proportions_until_labels_run_out(alpha: float) -> None:
    found = torch.cat([mixed(dirichlet(LABELS, 20, alpha, seed)) for seed in range(4)])
    drawn = np.concatenate([mixes(np.full(10, 400), 20, alpha, seed) for seed in range(4)])
    assert np.corrcoef(found.flatten(), drawn.ravel())[0, 1] > 0.85
    noise = 0.09 / 200  # of 200 draws
    assert 0.5 < float(found.var()) / (drawn.var() + noise) < 1.1


def test_more_ranks_than_examples_raise_task_error() -> None:
    with pytest.raises(TaskError, match="ranks=11: must be at most 10, because each rank needs an example"):
        dirichlet(LABELS[:10], 11, 1.0, 0)
    with pytest.raises(TaskError, match="ranks=3: must be at most 2, because each rank needs a file"):
        by_files(torch.tensor([0, 0, 1]), 3)


# Digits.


def drawn(task: Any, rank: int, ranks: int, batches: int, seed: int = 0) -> list[Any]:
    return list(islice(task.build().data(rank, ranks, 32, seed), batches))


def test_a_rank_reads_its_shard_only_and_all_of_it_in_an_epoch() -> None:
    images = _images(held_out=False)[0].flatten(1)
    for rank, shard in enumerate(_skewed(4, 0.3, 0)):
        read = [x.flatten(1) for x, _ in drawn(Digits(shards="dirichlet", alpha=0.3), rank, 4, 12)]
        epoch = torch.cat(read)[: len(shard)]
        assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, images[shard].tolist()))


def test_iid_keeps_the_plain_order_and_dirichlet_does_not() -> None:
    iid, skewed = Digits(), Digits(shards="dirichlet", alpha=0.1)
    plain = torch.cat([y for _, y in drawn(iid, 0, 4, 11)])
    own = torch.cat([y for _, y in drawn(skewed, 0, 4, 11)])
    order = torch.cat(list(islice(shuffled(len(_images(held_out=False)[1]), 0, 4, 32, 0), 11)))
    assert torch.equal(plain, _images(held_out=False)[1][order])
    assert torch.bincount(plain, minlength=10).max() < 60 < torch.bincount(own, minlength=10).max()
    again = torch.cat([y for _, y in drawn(skewed, 0, 4, 11)])
    other = torch.cat([y for _, y in drawn(skewed, 0, 4, 11, seed=1)])
    assert torch.equal(own, again) and not torch.equal(own, other)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"shards": "skewed"}, "shards='skewed': must be one of iid, dirichlet"), ({"alpha": 0.0}, "alpha=0.0: must be")],
)
def test_invalid_shard_settings_raise_knob_error(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(KnobError, match=words):
        Experiment(task=Digits(**settings)).checked()


@pytest.mark.ranks
def test_shards_stay_when_the_batch_size_changes() -> None:
    task = Digits(width=4, hidden=16, shards="dirichlet", alpha=0.05)
    e = Experiment(task=task, ranks=3, steps=8, eval_every=0, strategy=DDP()).checked()
    seen: list[set[int]] = [set(), set(), set()]
    sessions = run(e, Change(4, "batch", 48))
    for s in sessions:
        for _ in range(30):
            seen[s.rank.index] |= set(s.training.batches.next_batch()[1].tolist())
    shown = _images(held_out=False)[1]
    for rank, shard in enumerate(_skewed(3, 0.05, 0)):
        assert seen[rank] <= set(shown[shard].tolist())


@pytest.mark.ranks
def test_skewed_shards_increase_drift_between_averages() -> None:
    drift = {}
    for shards in ("iid", "dirichlet"):
        task = Digits(width=4, hidden=32, shards=shards, alpha=0.05)
        e = Experiment(task=task, ranks=4, steps=24, eval_every=7, strategy=LocalSGD(every=8), pace=5.0,
                       fabric=Fabric(link=Link(bandwidth=100.0)))  # fmt: skip
        found = simulate(e, real=True).samples
        drift[shards] = float(found[(found.name == "drift") & (found.step == 7)].value.mean())
    assert drift["dirichlet"] > 1.3 * drift["iid"]


# ByteGPT.


def test_with_files_each_rank_reads_its_own_files_and_about_equally_many_bytes() -> None:
    shards = _filed(64, 4)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(sum(map(len, shards))))
    assert max(map(len, shards)) < 1.02 * min(map(len, shards))
    stops = ends(held_out=False)
    files = [set(torch.searchsorted(stops, shard * 64, right=True).tolist()) for shard in shards]
    assert all(not a & b for i, a in enumerate(files) for b in files[:i])
    windows = source(held_out=False).unfold(0, 65, 64)
    texts = {bytes(windows[i].numpy()) for i in shards[2].tolist()}
    assert all(bytes(w.numpy()) in texts for x in drawn(ByteGPT(shards="files"), 2, 4, 5) for w in x)


def test_files_end_where_the_text_ends() -> None:
    for held_out in (False, True):
        stops = ends(held_out)
        assert int(stops[-1]) == len(source(held_out)) and bool((stops.diff() >= 0).all())
