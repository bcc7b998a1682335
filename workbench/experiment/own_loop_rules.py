"""Settings that exclude a task's own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.settings import members

if TYPE_CHECKING:
    from workbench.experiment.views import ExperimentView


def explain_refusal(e: ExperimentView) -> str | None:
    """Returns why the task's own loop cannot run as `e` says, with a remedy; or None."""
    if not e.task.has_own_loop:
        return None
    name, strategy = type(e.task).__name__, type(e.strategy).__name__
    if isinstance(function := getattr(e.task, "run", None), str):
        return f"task={name}: a record keeps only the name of its function; pass {name}(run={function}) again"
    if not e.strategy.follows:
        return (
            f"strategy={strategy}: its step is not forward, backward, update in this order, and the loop of a {name} "
            f"makes only such steps; take {', '.join(list_followers())}"
        )
    if (times := getattr(e.strategy, "accumulate", 1)) > 1:
        return f"accumulate={times}: the loop of a {name} decides itself how many batches it sums; take accumulate=1"
    if e.partition.size > 1:
        return f"partition={type(e.partition).__name__}: the loop of a {name} computes a whole model; take Whole()"
    if not e.optimizer.of_task:
        return f"optimizer={type(e.optimizer).__name__}: the loop of a {name} uses its own optimizer; take TaskOwn()"
    if e.lr or e.lr_scaled or e.lr_warmup:
        return f"lr={e.lr:g}: the loop of a {name} sets its own rates; leave lr, lr_scaled and lr_warmup as they are"
    if e.on_nan in ("skip", "roll back"):
        return f"on_nan={e.on_nan!r}: the loop of a {name} cannot go back; take 'pause', 'stop' or 'auto'"
    if e.save_every:
        return (
            f"save_every={e.save_every}: a run cannot resume in the middle of a {name}'s loop; take save_every=0, "
            f"and save the model in the loop"
        )
    if e.on_death != "end" or e.on_hang != "wait":
        field, value = ("on_death", e.on_death) if e.on_death != "end" else ("on_hang", e.on_hang)
        good = "end" if field == "on_death" else "wait"
        return f"{field}={value!r}: the loop of a {name} cannot lose or replace ranks; take {good!r}"
    return None


def list_followers() -> list[str]:
    """Returns the names of the strategies that can follow a task's own loop."""
    from workbench.strategies import Strategy

    family: type = Strategy
    found: dict[str, type[Strategy]] = members(family)
    return sorted(name for name, cls in found.items() if cls.follows)
