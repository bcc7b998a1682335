"""The core's verbs that a coroutine may ask of its host, in one table for engine and simulator.

A method of Rank makes an Op, with a verb and these arguments. `engine/compute/host.py` and `sim/compute/host.py`
perform them. `workbench.host` asks a few more, of the host alone. Some families of strategies need more verbs. Each has
a table in its package, such as `workbench/strategies/embedding_tables/verbs.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple


class Verb(NamedTuple):
    """arguments: the names of the Op's arguments, in order; family: "core", or the methods that need it."""

    arguments: tuple[str, ...] = ()
    family: str = "core"


VERBS = {
    "forward": Verb(("x", "micro")),
    "backward": Verb(("grad", "micro")),
    "update": Verb(("bucket", "by", "on")),
    "params": Verb(),
    "grads": Verb(),
    "slots": Verb(),
    "hold": Verb(("bucket",)),
    "batch": Verb(),
    "client": Verb(("index", "count")),
    "all_reduce": Verb(("x", "op", "name")),
    "reduce_scatter": Verb(("x", "name")),
    "all_gather": Verb(("x", "name")),
    "all_to_all": Verb(("x", "name")),
    "all_to_allv": Verb(("rows", "lengths", "name")),
    "broadcast": Verb(("x", "source", "name")),
    "send": Verb(("tensor", "to", "kind")),
    "recv": Verb(("into", "source", "kind")),
    "start": Verb(("child", "lane", "name", "priority", "share")),
    "wait": Verb(("handle",)),
    "again": Verb(("rest", "alone")),
    "clock": Verb(),
    "sample": Verb(("name", "value")),
    # a forward or backward that is iterated: `async for bucket in rank.backward()`
    "forward_buckets": Verb(("passing",), "iterated passes"),
    "next_params": Verb(("passing",), "iterated passes"),
    "backward_buckets": Verb(("grad", "micro"), "iterated passes"),
    "next_bucket": Verb((), "iterated passes"),
    # asked by `workbench.host`
    "stage_forward": Verb(("x", "micro", "chunk"), "host"),
    "stage_backward": Verb(("grad", "micro", "chunk"), "host"),
    "stage_inputs": Verb(("grad", "micro", "chunk"), "host"),
    "stage_weights": Verb(("micro", "chunk"), "host"),
    "coded": Verb(("name", "compute", "nbytes"), "host"),
    "stand": Verb(("seconds",), "host"),
    "drive": Verb(("coroutine",), "host"),
}


def list_verbs(*functions: Callable[..., object]) -> dict[str, Verb]:
    """Returns a family's table. Each function takes a rank and the verb's arguments, and makes its Op."""
    found = {}
    for function in functions:
        _, *arguments = inspect.signature(function).parameters
        found[function.__name__] = Verb(tuple(arguments), function.__module__.split(".")[-2])
    return found
