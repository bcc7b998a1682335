"""Writes the part of docs/reliability.md on other systems in the same test."""

from __future__ import annotations

from typing import Any

from tests.bench.recovering.killing import middle

HEAD = ["", "beside two that spin", "kills", "noticed (s: median, worst)", "next step of a new group (s)",
        "four train again (s)", "finished steps made again", "load"]  # fmt: skip
ABOUT = """## Others in the same test

Measured by `make recovering OTHERS=python` (a Python that has the others; `BUSY=1`: beside two processes that spin),
and kept in `docs/data/recovering.json`: {versions}; {cores} cores; seed {seeds}.
Four workers on one machine train the same small network over gloo, a step of 50 ms and the arithmetic. From one to
three seconds after all four train, one of them gets a SIGKILL. A group is new when the dead one is not in it. The load
is the average of the last minute, at the end.
{load}
{table}{notes}

How each was set up:

- **workbench**: `on_death="replace"`, DDP; cold, or with `Lab(spare=1)`, killed once the spare engine is warm.
- **torchrun**: after torch's [tutorial](https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html),
  a snapshot every 20 steps, `--standalone --max-restarts=1000`. With torch 2.13 and gloo that alone did not come back
  within two minutes: workers share the agent's store, find there the addresses of those before them, and are refused
  (cf. [issue 135712](https://github.com/pytorch/pytorch/issues/135712)). With `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`,
  as is proposed there, it does, and so it was measured.
- **torchft**: as its README says, `torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000`,
  a torchrun for each replica, a Manager with the time limits of its example: 10 s, an all-reduce 5 s; a replica is
  missed after 5 s without a heartbeat (the default). In the other row both 5 s are 1 s; heartbeats alone change
  nothing (5.2 s, two kills); likely some of those left wait until the all-reduce's limit is over. Gradients are
  averaged by `Manager.allreduce`, as one bucket. With its own `DistributedDataParallel` (0.2.0), as in the README,
  whoever is in an all-reduce when another dies ends, too: gloo's error makes `wait` return before there is a future,
  and the next line of its hook asserts one. Of three kills two fell between two all-reduces; after the third all four
  began at step 0, 321 steps back.
- **Ray Train**: after its [guide](https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html),
  `TorchTrainer`, `max_failures=-1`, a checkpoint every 20 steps.

What is unequal:

- torchrun and Ray Train start all processes anew, and imports of torch are most of the time that this takes; torchft
  and we keep those who are left. Both give steps back that were finished since the last checkpoint, so how many are
  made again is up to how often one is written: here every 20 steps.
- Others notice when the first worker's step fails, or, where none does, when the new group's first step is made; we,
  when those left have agreed who is lost, or the kernel says so, whichever is first.
- Our engines run at a lower priority (nice 5), the others' workers do not.
- The others are made for many machines, where a peer that is gone is not told at once by a closed connection. Here is
  one, so nothing of that is measured.

"""
LOADED = """
**No row is from a quiet machine.** Others had it busy all the time: far more processes wanted the cores than there
were, and what starts processes took many times as long as it would alone. Rows hold beside each other as far as their
loads are alike, and no number of this table beside one of another page.
"""
BOTH = """
The rows beside two that spin are of a day on which far more processes wanted the cores than there were, as their load
says: they hold beside each other, and not beside those of a quiet machine.
"""
KEYS = ("noticed", "on", "full", "again")


def rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """Returns a row for each system and condition."""
    out = []
    for one in found:
        each = [kill for kill in one["each"] if "never" not in kill]
        cells = []
        for key in KEYS:
            values = [kill[key] for kill in each if kill[key] is not None]
            lost = len(each) - len(values)
            cells.append(middle(values, 0 if key == "again" else 2) + (f" ({lost} never)" if lost else ""))
        load = middle([kill["load"] for kill in each], 0)
        out.append([one["who"], "yes" if one["busy"] else "no", str(len(each)), *cells, load])
    return out


def section(found: list[dict[str, Any]]) -> str:
    """Returns the table and its conditions; "" without measurements."""
    if not found:
        return ""
    versions = ", ".join(f"{name} {number}" for name, number in found[0]["versions"].items())
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *rows(found))]
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(one["seed"] for one in found))
    notes = "".join(
        f"\n\n{one['who']}{', beside two that spin' * one['busy']}: {one['note']}" for one in found if "note" in one
    )
    return ABOUT.format(notes=notes, versions=versions, cores=found[0]["cores"], seeds=seeds, table="\n".join(lines),
                        load=BOTH if any(not one["busy"] for one in found) else LOADED)  # fmt: skip
