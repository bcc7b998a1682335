"""Writes the part of docs/project/reliability.md on other systems in the same test."""

from __future__ import annotations

from typing import Any

from tests.bench.recovering.killing import middle

HEAD = ["", "with two busy processes", "kills", "seconds until noticed (median, worst)",
        "seconds until a new group's next step", "seconds until four train again", "repeated steps",
        "load"]  # fmt: skip
ABOUT = """## Other systems in the same test

`make recovering OTHERS=python` measures these rows and keeps them in `docs/data/recovering.json`. `python` is a Python
with the other systems. `BUSY=1` runs the test next to two busy processes.

Versions: {versions}. Machine: {cores} cores. Seed: {seeds}.

Four workers on one machine train the same small network over gloo. A step takes 50 ms plus the arithmetic. One to three
seconds after all four train, a worker receives SIGKILL. A group is new when the dead worker is not in it. The load
is the average of the last minute, at the end.
{load}
{table}{notes}

How each was set up:

- **workbench**: `on_death="replace"`, DDP; cold, or with `Lab(spare=1)`, killed once the spare engine is warm.
- **torchrun**: after torch's [tutorial](https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html),
  with a snapshot every 20 steps and `--standalone --max-restarts=1000`. With torch 2.13 and gloo the group did not come
  back within two minutes. Workers share the agent's store, find the addresses of the former workers, and cannot connect
  ([issue 135712](https://github.com/pytorch/pytorch/issues/135712)). With `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, as
  proposed in the issue, the group comes back. The table shows this variant.
- **torchft**: as its README says, `torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000`,
  and a torchrun for each replica. The Manager has the time limits of its example: 10 s, and 5 s for an all-reduce. A
  replica is lost after 5 s without a heartbeat (the default). In the other row both limits of 5 s are 1 s. A shorter
  heartbeat limit alone changes nothing (5.2 s, two kills). Probably some remaining replicas wait for the all-reduce's
  limit. `Manager.allreduce` averages the gradients as one bucket.
- **torchft, its DDP**: with torchft's own `DistributedDataParallel` (0.2.0), as in the README. If a replica dies during
  an all-reduce, the other replicas in it end, too. gloo's error makes `wait` return without a future, and the next line
  of the hook asserts a future. Of three kills two occurred between two all-reduces. After the third kill all four
  replicas began at step 0, 321 steps back.
- **Ray Train**: after its [guide](https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html),
  `TorchTrainer`, `max_failures=-1`, a checkpoint every 20 steps.

Differences in the conditions:

- torchrun and Ray Train restart all processes, and importing torch takes most of that time. torchft and the workbench
  keep the remaining processes.
- torchrun and Ray Train lose the steps since the last checkpoint. So the number of repeated steps depends on the period
  of the checkpoints, here 20 steps.
- The other systems notice a death when the first worker's step fails, or otherwise with the new group's first step. The
  workbench notices it when the remaining ranks have agreed on the loss, or when the kernel reports it.
- The workbench's engines run at a lower priority (nice 5). The workers of the other systems do not.
- The other systems are made for many machines, on which a closed connection does not report a dead peer at once. This
  test uses one machine and does not measure that.

"""
LOADED = """
**No row is from a quiet machine.** Other work kept the machine busy: far more processes than cores were ready to run.
Starting a process took many times as long as usual. Compare only rows of similar load, and no number with a number of
another page.
"""
BOTH = """
The rows with two busy processes are from a day with far more ready processes than cores, as the load shows. Compare
these rows with each other, not with the rows of a quiet machine.
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
        f"\n\n{one['who']}{', with two busy processes' * one['busy']}: {one['note']}" for one in found if "note" in one
    )
    return ABOUT.format(notes=notes, versions=versions, cores=found[0]["cores"], seeds=seeds, table="\n".join(lines),
                        load=BOTH if any(not one["busy"] for one in found) else LOADED)  # fmt: skip
