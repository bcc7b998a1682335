"""Recipes: functions that return experiments to begin with. They start nothing."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from workbench.compressors import Zen
from workbench.experiment.experiment import Experiment
from workbench.fabric import Fabric, Link, Slow
from workbench.settings import KnobError, short
from workbench.strategies import DDP
from workbench.tasks import ByteGPT, ClickThrough, Digits


def first_run() -> Experiment:
    """ByteGPT on 4 paced ranks over a link that is slightly too slow: every control shows an effect."""
    return Experiment(task=ByteGPT(), strategy=DDP(), pace=100, fabric=Fabric(link=Link(bandwidth=300, latency=0.5)))


def slow_link() -> Experiment:
    """ByteGPT over a very slow link: plain data parallelism waits for communication most of the time."""
    return Experiment(task=ByteGPT(), pace=150, fabric=Fabric(link=Link(bandwidth=40, latency=0.5)), eval_every=10)


def digits() -> Experiment:
    """Digits at full speed: 90 % accuracy within seconds."""
    return Experiment(task=Digits(), eval_every=10)


def clicks() -> Experiment:
    """ClickThrough over a slow link. Almost everything that Dense sends is zero: try the compressor Dense, then Zen."""
    fabric = Fabric(link=Link(bandwidth=100, latency=0.2))
    return Experiment(task=ClickThrough(), compressor=Zen(), pace=50, fabric=fabric)


def full_speed() -> Experiment:
    """ByteGPT at full speed: no pace, no emulated network."""
    return Experiment(task=ByteGPT())


def one_slow_rank() -> Experiment:
    """ByteGPT with rank 2 at half speed: find the cause and its victims."""
    slow = Slow(rank=2, factor=2.0)
    return Experiment(task=ByteGPT(), pace=80, fabric=Fabric(link=Link(bandwidth=1000), faults=(slow,)))


def recipes() -> dict[str, Callable[[], Experiment]]:
    """Returns all recipes by name."""
    found = {name: f for name, f in globals().items() if inspect.isfunction(f) and f.__module__ == __name__}
    return {name: f for name, f in found.items() if not inspect.signature(f).parameters and name != "recipes"}


def recipe(name: str) -> Experiment:
    """Returns the experiment of a recipe.

    name:  such as "first_run". `docs/reference/experiment.md` lists all recipes

    Raises KnobError with the nearest name if it is unknown.
    """
    every = recipes()
    if not isinstance(name, str):
        raise KnobError(f"recipe={short(name)}: must be a recipe's name; there are {', '.join(every)}")
    if name not in every:
        near = difflib.get_close_matches(name, every, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(every)}"
        raise KnobError(f"recipe={short(name)}: no such recipe; {hint}")
    return every[name]()
