"""Writes docs/project/reliability.md: stress tests of labs, their results and their times.

    python -m tests.bench.reliability

This module measures nothing. Campaigns: `python -m tests.campaign --seed N --out docs/data/campaigns/N.json`; changes
without faults: `python -m tests.torture --seed N --out docs/data/torture.json --minutes 30`; interrupts: `python -m
tests.interrupts --out docs/data/interrupts.json`; an hour: `python -m tests.soak --out docs/data/soak.json`;
kills: `python -m tests.deaths --out docs/data/deaths/quiet.json`; other systems in the same test: `make recovering`.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench import cycles_page, damage_page, deaths_page, joins_page, last_steps_page, soak_page
from tests.bench.joins_page import quote_error
from tests.bench.recovering import table as others

ROOT = Path(__file__).parents[2]
# Sections between "Killed ranks" and "Changes without faults": heading, file in docs/data, function for the text.
SECTIONS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("Faults while ranks join", "joins.json", joins_page.describe),
    ("Damaged checkpoints and records", "damage.json", damage_page.describe),
    ("Checkpoints of a last step", "last_steps.json", last_steps_page.describe),
    ("Labs that open and close", "cycles.json", cycles_page.describe),
)
CHANGES, FAULTS = 10_000, 500  # required
KINDS = {
    "kill": "a rank's engine killed (SIGKILL)",
    "freeze": "a rank's engine stopped for up to 3 s (SIGSTOP)",
    "join": "a rank joins",
    "leave": "a rank is removed",
    "cut": "all connections between two ranks shut down",
    "interrupt": "the kernel interrupted during a call",
    "end_controller": "ipyparallel's controller killed",
    "kernel": "the kernel killed",
}
KERNELS = {"kernel at any moment": "the kernel killed at any moment: no process remains",
           "kernel training": "killed during training, in half of the cases with a stopped engine: no process remains",
           "kernel detached": "killed with a detached lab: it attaches again with a complete record"}  # fmt: skip
OTHERS = """| | statement | source |
| --- | --- | --- |
| torchft | Tolerates faults per step: members may change between two steps, heartbeats show health, \
and a new member takes its state from a healthy peer. For replicated weights (DDP, the replicated dimension of \
HSDP); LocalSGD and DiLoCo are experimental. It promises no time. | \
[README](https://github.com/meta-pytorch/torchft/blob/main/README.md) |
| | Managers send a heartbeat every 100 ms; the authors consider a threshold of 1 s sufficient. | \
[issue 35](https://github.com/meta-pytorch/torchft/issues/35) |
| | Only a time limit ends a hanging collective on the other members. The issue proposes to end it when heartbeats \
stop. | [issue 164](https://github.com/meta-pytorch/torchft/issues/164) |
| | A user measured 948 s from a fault until all members trained again (Llama 3 8B, torchtitan). The user asks why. | \
[issue 329](https://github.com/meta-pytorch/torchft/issues/329) |
| torchrun | When a worker fails, or members change, the agent restarts all workers, at most `--max-restarts` \
times in total. | [elastic agent](https://docs.pytorch.org/docs/stable/elastic/agent.html), \
[quickstart](https://docs.pytorch.org/docs/stable/elastic/quickstart.html) |
| | The steps since the last checkpoint are lost. The script saves and loads. | \
[train script](https://docs.pytorch.org/docs/stable/elastic/train_script.html) |
| Ray Train | After a failure it shuts all workers down and starts new ones, which may load the latest \
checkpoint. The training function saves and loads. | \
[failures](https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html) |
| | Off by default (`max_failures` is 0). With a range of workers it continues with the available ones, in new \
processes. | [FailureConfig](https://docs.ray.io/en/latest/train/api/doc/ray.train.FailureConfig.html), \
[elastic](https://docs.ray.io/en/latest/train/user-guides/elastic-training.html) |
"""


Each = list[dict[str, Any]]  # rounds of campaigns, interrupts, or labs changed without faults


def read(data: Path) -> tuple[Each, Each, Each, dict[str, Any], Each, Each, dict[str, Any]]:
    """Returns rounds of campaigns, interrupts, labs without faults, the hour, other systems and kills, and
    `SECTIONS`.
    """
    rounds = [{**one, "campaign": file.stem} for file in sorted(data.glob("campaigns/*.json"))
              for one in json.loads(file.read_text())["each"]]  # fmt: skip
    broken, calm = (json.loads(file.read_text())["each"] if file.exists() else []
                    for file in (data / "interrupts.json", data / "torture.json"))  # fmt: skip
    hour, same = (json.loads(file.read_text()) if file.exists() else None
                  for file in (data / "soak.json", data / "recovering.json"))  # fmt: skip
    kills = [json.loads(file.read_text()) for file in sorted(data.glob("deaths/*.json"))]
    more = {name: json.loads(file.read_text()) for _, name, _ in SECTIONS if (file := data / name).exists()}
    return rounds, broken, calm, hour or {}, same or [], kills, more


def seconds(times: list[float]) -> str:
    return f"{statistics.median(times):.1f}, {max(times):.1f}" if times else ""


def gathered(rounds: Each, what: str) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for one in rounds:
        for kind, times in one[what].items():
            out.setdefault(kind, []).extend(times)
    return out


def table(rounds: Each) -> str:
    """Returns a table by kind: injected, survived, seconds until reported, seconds until all make steps again."""
    done = Counter[str]()
    for one in rounds:
        done.update(one["done"])
    seen, on = gathered(rounds, "noticed"), gathered(rounds, "recovered")
    ended = Counter(one["at"] for one in rounds if one["at"] and not one["wrong"])
    wrong = Counter(one["at"] for one in rounds if one["wrong"])
    lines = ["| fault | injected | survived | ended with an error | wrong | seconds until noticed (median, worst) | "
             "seconds until all remaining ranks train (median, worst) |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for kind, words in KINDS.items():
        survived = done[kind] - ended[kind] - wrong[kind]
        lines.append(f"| {words} | {done[kind]} | {survived} | {ended[kind]} | {wrong[kind]} | "
                     f"{seconds(seen.get(kind, []))} | {seconds(on.get(kind, []))} |")  # fmt: skip
    for kind, words in KERNELS.items():
        times = on.get(kind, [])
        lines.append(f"| … {words} | | {len(times)} | | | | {seconds(times)} |")
    return "\n".join(lines)


def campaigns(rounds: Each) -> str:
    lines = ["| first seed | minutes | rounds | changes applied | refused | faults | ended with an error | wrong |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name in dict.fromkeys(one["campaign"] for one in rounds):
        mine = [one for one in rounds if one["campaign"] == name]
        done = sum((Counter(one["done"]) for one in mine), Counter[str]())
        lines.append(f"| {mine[0]['seed']} | {sum(one['seconds'] for one in mine) / 60:.0f} | {len(mine)} | "
                     f"{done['applied']} | {done['refused']} | {sum(done[k] for k in KINDS)} | "
                     f"{done['ended in words']} | {sum(bool(one['wrong']) for one in mine)} |")  # fmt: skip
    return "\n".join(lines)


def without_faults(calm: Each) -> str:
    lines = ["| first seed | minutes | labs | changes applied | refused | pauses, steps | wrong |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    if calm:
        done = " | ".join(str(sum(one.get(what, 0) for one in calm)) for what in ("applied", "refused", "others"))
        minutes, wrong = sum(one["seconds"] for one in calm) / 60, sum(bool(one["wrong"]) for one in calm)
        lines.append(f"| {calm[0]['seed']} | {minutes:.0f} | {len(calm)} | {done} | {wrong} |")
    return "\n".join(lines)


def interrupts(broken: Each) -> str:
    """Returns the results of the interrupts, by the kernel's activity."""
    lines = ["| interrupted call | times | inside of the call | trained ten steps | closed without remains | wrong |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for point in sorted({one["point"] for one in broken}):
        mine = [one for one in broken if one["point"] == point]
        came = Counter("wrong" if one["outcome"].startswith("WRONG") else one["outcome"] for one in mine)
        hit = sum(bool(one.get("hit")) for one in mine)
        lines.append(f"| {point} | {len(mine)} | {hit} | {came['trains']} | {came['closed']} | {came['wrong']} |")
    return "\n".join(lines)


def counted(rounds: Each) -> tuple[int, int]:
    """Returns the numbers of applied changes and of faults in these rounds."""
    done = sum((Counter(one["done"]) for one in rounds), Counter[str]())
    return done["applied"], sum(done[kind] for kind in KINDS)


def wrongs(rounds: Each, broken: Each, calm: Each) -> list[str]:
    """Returns a line for each wrong result, with its cause if a later change removed it."""
    found = [(f"seed {one['seed']}, after {one['at']}", one) for one in rounds if one["wrong"]]
    found += [(f"without faults, seed {one['seed']}", one) for one in calm if one["wrong"]]
    lines = [f"- {where}: {quote_error(one['wrong'].splitlines()[0][:160] + '…')}. "
             f"{'Cause, removed since: ' + one['mended'] if 'mended' in one else 'Not fixed yet.'}"
             for where, one in found]  # fmt: skip
    return lines + [f"- interrupt {one['round']}, {one['point']}: {quote_error(one['outcome'][7:300])}"
                    for one in broken if one["outcome"].startswith("WRONG")]  # fmt: skip


def list_wrong(rounds: Each, broken: Each, calm: Each) -> str:
    """Returns the section on wrong results, or nothing if there are none."""
    found = "\n".join(wrongs(rounds, broken, calm))
    return f"## Rounds that ended wrong\n\n{found}\n\n" if found else ""


def since(rounds: Each, broken: Each) -> str:
    """Returns sentences on the successes after the last wrong round, if there is one."""
    last = max((number for number, one in enumerate(rounds) if one["wrong"]), default=None)
    if last is None:
        return ""
    applied, faults = counted(rounds[last + 1 :])
    text = f" The {len(rounds) - last - 1} rounds after the last wrong round had {applied:,} changes and {faults} " \
           f"faults, and lost nothing."  # fmt: skip
    every = faults + len(broken)
    if not wrongs([], broken, []) and applied >= CHANGES and every >= FAULTS:
        text += f" With the interrupts, which lost nothing either, these are {every} faults, as required."
    return text


def against(rounds: Each, broken: Each, calm: Each) -> str:
    """Returns sentences that compare the results so far with the requirement."""
    (applied, faults), quietly = counted(rounds), sum(one.get("applied", 0) for one in calm)
    changes, harmed, wrong = applied + quietly, faults + len(broken), wrongs(rounds, broken, calm)
    text = (f"{changes:,} changes ({applied:,} in campaigns, {quietly:,} without faults) and {harmed:,} faults "
            f"({faults} in campaigns, {len(broken)} interrupts). {len(wrong)} ended wrong. The goal is {CHANGES:,} "
            f"changes and {FAULTS:,} faults without any loss. ")  # fmt: skip
    if changes < CHANGES or harmed < FAULTS:
        text += "**The goal is not reached yet.**"
    else:
        text += "**The numbers are reached, but not without loss.**" if wrong else "The goal is reached."
    return text + since(rounds, broken)


def overview(rounds: Each, broken: Each, calm: Each, hour: dict[str, Any], kills: Each, more: dict[str, Any]) -> str:
    """Returns a table with a row for each test: its size, and how many of its tries went wrong."""
    joins = [one for one in more.get("joins.json", {}).get("each", []) if joins_page.counts(one)]
    damage, steps = more.get("damage.json", {}).values(), more.get("last_steps.json", {}).values()
    cycles = more.get("cycles.json", {}).get("cycles", [])
    (applied, faults), quietly = counted(rounds), sum(one.get("applied", 0) for one in calm)
    killed, survived = (sum(one[what] for one in kills) for what in ("kills", "survived"))
    rows = [
        ("Campaigns", f"{applied:,} changes and {faults} faults", sum(bool(one["wrong"]) for one in rounds)),
        ("Killed ranks", f"{killed} kills", killed - survived),
        ("Faults while ranks join", f"{len(joins)} rounds", sum(one["outcome"] == "wrong" for one in joins)),
        ("Damaged checkpoints and records", f"{sum(one['next'] for one in damage):,} changed files",
         sum(len(one["wrong"]) for one in damage)),
        ("Checkpoints of a last step", f"{len(steps)} pairs", sum(one["outcome"] == "wrong" for one in steps)),
        ("Labs that open and close", f"{len(cycles)} cycles", sum(bool(one["left"]) for one in cycles)),
        ("Changes without faults", f"{quietly} changes", sum(bool(one["wrong"]) for one in calm)),
        ("Interrupts", f"{len(broken)} interrupts", len(wrongs([], broken, []))),
        ("Memory over an hour", f"{hour.get('minutes', 0):g} minutes", len(hour.get("wrong", ()))),
    ]  # fmt: skip
    lines = [f"| [{head}](#{head.lower().replace(' ', '-')}) | {size} | {wrong} |" for head, size, wrong in rows]
    return "\n".join(["| test | size | wrong |", "| --- | --- | --- |", *lines])


def page(rounds: Each, broken: Each, calm: Each, hour: dict[str, Any], same: Each | None = None,
         kills: Each | None = None, more: dict[str, Any] | None = None) -> str:  # fmt: skip
    """Returns docs/project/reliability.md. more: the data of each section in `SECTIONS`, by file name."""
    sections = "".join(f"## {head}\n\n{describe((more or {}).get(name, {}))}\n" for head, name, describe in SECTIONS)
    files = ", ".join(f"`docs/data/{name}`" for _, name, _ in SECTIONS)
    return f"""# Reliability: stress tests of labs

**Question:** What do labs survive when ranks are killed, changed and damaged at random?

**Result:** {against(rounds, broken, calm)}

**Machine:** 2 shared cores. Other work ran next to most of these tests. So the times of campaigns are upper bounds.

{overview(rounds, broken, calm, hour, kills or [], more or {})}

`python -m tests.bench.reliability` wrote this page from `docs/data/campaigns/`, `docs/data/deaths/`,
`docs/data/torture.json`, `docs/data/interrupts.json`, `docs/data/soak.json`, `docs/data/recovering.json`,
{files}.

## Campaigns

A round is one lab of 5 engines (seeds before 20008: 6) and one run that begins with 4 ranks. The campaign makes live
changes in waves, and then causes a fault. A run survives the fault if all remaining ranks make steps again within
60 s. If no rank has the lost state, the run may end with an error that says so. At the end of a round all ranks are
bit-identical, and no row is lost or duplicate. Times after a death begin with the death. Other times begin with the
end of the fault.

{table(rounds)}

{campaigns(rounds)}

{list_wrong(rounds, broken, calm)}## Killed ranks

{deaths_page.section(kills or [])}

{sections}## Changes without faults

4 ranks make 2 runs in a lab. Each run has bursts of up to 8 changes at once, also to pipelines and slices. The test
checks that no step mixes settings, that all ranks are bit-identical, and that no row is lost. The second run must not
leave more threads or descriptors than the first.

{without_faults(calm)}

## Interrupts

A Jupyter kernel runs a cell and receives one SIGINT at a random moment of the cell. Then each rank must make ten more
steps, or the lab must close. A closed lab may not leave a process, a descriptor, shared memory or a file.

{interrupts(broken)}

## Memory over an hour

{soak_page.text(hour)}

{others.section(same or [])}## Promises of other systems

The statements are from the systems' own documentation and issues, as of November 2026.

{OTHERS}"""


def main() -> None:
    (ROOT / "docs" / "project" / "reliability.md").write_text(page(*read(ROOT / "docs" / "data")))


if __name__ == "__main__":
    main()
