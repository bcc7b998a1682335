"""Checks whether a partition fits ranks, batch and strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.experiment.views import ExperimentView
    from workbench.strategies import Strategy


def count_replicas(e: ExperimentView) -> int:
    """Returns the number of replicas. Each reads its own batches."""
    return e.ranks // e.partition.size


def place_in_replica(e: ExperimentView, rank: int) -> tuple[int, int]:
    """Returns a rank's replica and its place in it."""
    return divmod(rank, e.partition.size)


def find_data_shard(e: ExperimentView, rank: int) -> tuple[int, int, int | None]:
    """Returns the rank's data shard, the number of shards and a seed for random numbers or None.

    Without a partition every rank reads its own shard and uses the process's random numbers (None). With one, a
    replica's ranks read the same shard by the replica's seed.
    """
    if e.partition.size == 1:
        return rank, e.ranks, None
    number, _ = place_in_replica(e, rank)
    return number, count_replicas(e), e.seed * 100_003 + number + 1


def find_random_seed(e: ExperimentView, rank: int, step: int) -> int:
    """Returns the seed of a rank's random numbers from `step` on. Ranks that compute a layer together share it."""
    number = rank // e.partition.slices if e.partition.slices > 1 else rank
    return e.seed * 100_003 + number + 1 + 7919 * step


def explain_refusal(e: ExperimentView) -> str | None:
    """Returns why `e`'s partition cannot spread its replicas, with a remedy; or None."""
    partition, strategy = e.partition, e.strategy
    if partition.size == 1:
        return None
    said = f"partition={type(partition).__name__}"
    if e.ranks % partition.size:
        knob = {"tensor": "ways", "stage": "stages"}
        dims = ", ".join(f"{knob.get(name, name)}={size}" for name, size in partition.dims())
        fits = [n for n in range(2, e.ranks + 1) if e.ranks % n == 0]
        others = f"a number that divides {e.ranks} ({', '.join(map(str, fits))}), or " if fits else ""
        return (
            f"{dims}: one replica takes {partition.size} ranks, and {e.ranks} ranks are not a multiple of that; take "
            f"{others}ranks={-(-e.ranks // partition.size) * partition.size}"
        )
    if lacks := explain_unfit_strategy(strategy, count_replicas(e)):
        return (
            f"{said}: under {type(strategy).__name__} {lacks}; take partition=Whole() with it, or a strategy in "
            f"lockstep with whole tensors, such as DDP, LocalSGD or DiLoCo; one change may set both"
        )
    times = getattr(strategy, "accumulate", 1)
    if partition.ahead(0) and times > 1:
        kind = type(getattr(partition, "schedule", partition)).__name__
        return (
            f"accumulate={times}: {kind} updates after every batch, with gradients of weights that are one update "
            f"old; take accumulate=1 and a larger batch, or schedule=OneFOneB()"
        )
    return partition.refuses(e.batch)


def explain_unfit_strategy(strategy: Strategy, size: int) -> str:
    """Returns the property of a strategy that rules out replicas on several ranks; or ""."""
    said = {
        "torch's own exchange needs the whole model on every rank": strategy.opaque,
        "ranks shard parameters that the ranks of a pipeline or a layer split already": strategy.shards,
        "ranks keep their parameters in one memory": strategy.shared,
        "ranks have several workers": strategy.workers > 1,
        "ranks also exchange in the background": strategy.has_background,
        "a rank needs all gradients or examples of its replica at once": strategy.sees_all,
        "parameters are updated in the next forward, bucket by bucket": strategy.late_update,
        "some ranks serve": not all(strategy.trains(r, size) for r in range(size)),
        "ranks do not train in lockstep": not strategy.lockstep,
    }
    return next((words for words, holds in said.items() if holds), "")
