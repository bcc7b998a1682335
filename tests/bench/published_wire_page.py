# ruff: noqa: E501
"""Writes the section of a page of docs/project/benchmarks/ on published bandwidths and overlap, next to predictions."""

from __future__ import annotations

from typing import Any

from tests.bench.page import table
from tests.bench.published_wire import DELAY, OVERLAP, RANKS, SHARES

NEAR = 0.35  # bandwidths in the table are 20 % apart
DILOCO = f"""Douillard et al., 2025 (arXiv 2501.18512), table 4, has the bandwidths at which ranks compute for a given share of their time. The model has 1 billion parameters in 24 layers and computes for 0.1 s a step. H is 100, and a fragment has 3 layers. The table gives neither the number of replicas ({RANKS} here) nor its overlap ({DELAY} steps here). Its bandwidths are on a grid with a factor of 1.2 between them. Our parameters have two bytes, forward takes 1/3 of a step, and there is no latency."""
WHY = f"""Why: in the authors' simulator every exchange runs during the backward pass of its step, as its page at arthurdouillard.com/diloco says. In ours DiLoCo's exchange begins when the step has ended. So ours hides no part of an exchange without a delay. Its error grows with the share of compute, and fragments alone gain nothing. With a delay ours needs less bandwidth, because {DELAY} steps are more than the table's overlap can be. A fragment has 2 Gbit. To send it in one step and a backward pass takes 12 Gbit/s, and the table has 11 at 99 %."""
DDP = """Li et al., VLDB 2020 (arXiv 2006.15704): with NCCL, overlap shortens a step of ResNet-50 by 38.0 % and of BERT by 35.2 % (section 5). These two numbers are from a quotation, because the paper itself was not at hand. DDP scales nearly linearly to 256 GPUs (abstract; no number). The compute time of a step is unknown, so the table varies it. Here 32 ranks train 25 million parameters in fp32, with buckets of 25 MB or with one bucket for all. A rank has 12.5 Gbit/s and needs 14 us for a message. This is an assumption: eight ranks share one 100 Gbit/s adapter."""


def section(d: dict[str, Any]) -> str:
    """Returns both checks, with kept and missed claims."""
    return "\n".join([DILOCO, "", _diloco(d["bandwidth"]), DDP, "", _ddp(d["ddp"])])


def count_near(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Returns how many predicted bandwidths are near the published ones, and how many there are."""
    ratios = [found / said for r in rows for said, found in zip(r["published"], r["predicted"], strict=True)]
    return sum(1 / (1 + NEAR) <= ratio <= 1 + NEAR for ratio in ratios), len(ratios)


def _diloco(rows: list[dict[str, Any]]) -> str:
    out, off = [], dict[str, list[float]]()
    for r in rows:
        for share, said, found in zip(SHARES, r["published"], r["predicted"], strict=True):
            off.setdefault(r["method"], []).append(found / said)
            out.append([r["method"], f"{share:.0%}", f"{said:g}", f"{found:.3g}", f"{found / said - 1:+.0%}"])
    near, of = count_near(rows)
    order = all(sorted(range(len(rows)), key=lambda i, k=k: rows[i]["predicted"][k]) == sorted(range(len(rows)), key=lambda i, k=k: rows[i]["published"][k])
                for k in (3,))  # fmt: skip
    worst = max(off, key=lambda name: max(max(x, 1 / x) for x in off[name]))
    head = ["method", "share of compute", "published, Gbit/s", "predicted, Gbit/s", "error"]
    return "\n".join([
        table(head, out),
        f"{near} of {of} are within a factor of {1 + NEAR:g} (goal: all): {_kept(near == of)}. At 95 % the methods are in the published order: {_kept(order)}. Farthest off is {worst}.\n",
        f"{WHY}\n",
    ])  # fmt: skip


def _ddp(d: dict[str, Any]) -> str:
    out = [[f"{r['computing'] * 1e3:.0f} ms", f"{r['apart'] * 1e3:.0f} ms", f"{r['beside'] * 1e3:.0f} ms", f"{1 - r['beside'] / r['apart']:.1%}"]
           for r in d["overlap"]]  # fmt: skip
    most = max(1 - r["beside"] / r["apart"] for r in d["overlap"])
    said = ", ".join(f"{name} {share:.1%}" for name, share in OVERLAP.items())
    ranks = {int(p): seconds for p, seconds in d["ranks"].items()}
    first, last = min(ranks), max(ranks)
    scale = ranks[first] / ranks[last]
    return "\n".join([
        table(["compute", "one bucket, after backward", "25 MB, during backward", "shorter by"], out),
        f"Published: {said}. Predicted: at most {most:.1%}, if sending takes as long as backward. It reaches the published gains: {_kept(most >= max(OVERLAP.values()))}. With infinitely small buckets the gain would be 40 %. The difference is the last bucket, which no compute hides.\n",
        f"From {first} to {last} ranks a step with 180 ms of compute keeps {scale:.0%} of its speed, with a ring. Published: nearly linear. The loss is 2 (p-1) messages of 14 us for each bucket. NCCL takes trees for many ranks.\n",
    ])  # fmt: skip


def _kept(is_so: bool) -> str:
    return "kept" if is_so else "NOT kept"
