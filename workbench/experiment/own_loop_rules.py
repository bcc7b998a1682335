"""Settings that exclude a task's own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.settings import members

if TYPE_CHECKING:
    from workbench.experiment.views import ExperimentView


def explain_refusal(e: ExperimentView) -> str | None:
    """Returns why the task's own loop cannot run as `e` says, and what to do instead; or None."""
    if not e.task.leads:
        return None
    name, strategy = type(e.task).__name__, type(e.strategy).__name__
    if isinstance(function := getattr(e.task, "run", None), str):
        return f"task={name}: a record keeps only the name of its function; give {name}(run={function}) again"
    if not e.strategy.follows:
        return (
            f"strategy={strategy}: a step of it is not a forward, a backward and an update in this order, and the loop "
            f"of a {name} makes no other; take {', '.join(list_followers())}"
        )
    if (times := getattr(e.strategy, "accumulate", 1)) > 1:
        return f"accumulate={times}: the loop of a {name} says itself how many batches it adds up; take accumulate=1"
    if e.partition.size > 1:
        return f"partition={type(e.partition).__name__}: the loop of a {name} computes a whole model; take Whole()"
    if not e.optimizer.of_task:
        return f"optimizer={type(e.optimizer).__name__}: the loop of a {name} steps its own; take TaskOwn()"
    if e.lr or e.lr_scaled or e.lr_warmup:
        return f"lr={e.lr:g}: the loop of a {name} sets its own rates; leave lr, lr_scaled and lr_warmup as they are"
    if e.on_nan in ("skip", "roll back"):
        return f"on_nan={e.on_nan!r}: the loop of a {name} cannot go back; take 'pause', 'stop' or 'auto'"
    if e.save_every:
        return f"save_every={e.save_every}: no run goes on from the midst of a loop of its own; let it save its model"
    if e.on_death != "end" or e.on_hang != "wait":
        field, value = ("on_death", e.on_death) if e.on_death != "end" else ("on_hang", e.on_hang)
        good = "end" if field == "on_death" else "wait"
        return (
            f"{field}={value!r}: the loop of a {name} goes on with the ranks that it began with, and with no others; "
            f"take {good!r}"
        )
    return None


def list_followers() -> list[str]:
    """Returns the names of the strategies that can follow a task's own loop."""
    from workbench.strategies import Strategy

    family: type = Strategy
    found: dict[str, type[Strategy]] = members(family)
    return sorted(name for name, cls in found.items() if cls.follows)
