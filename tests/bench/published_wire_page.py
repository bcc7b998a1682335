# ruff: noqa: E501
"""Writes the section of a page of docs/project/benchmarks/ on published bandwidths and overlap, next to predictions."""

from __future__ import annotations

from typing import Any

from tests.bench.page import table
from tests.bench.published_wire import DELAY, OVERLAP, RANKS, SHARES

NEAR = 0.35  # bandwidths in the table are 20 % apart
DILOCO = f"""Douillard et al., 2025 (arXiv 2501.18512), table 4: the Gbit/s at which ranks compute so large a share of their time, 1 billion parameters in 24 layers, 0.1 s of computing a step, H = 100, fragments of 3 layers. The table gives neither the number of replicas ({RANKS} here) nor its overlap ({DELAY} steps here), and its bandwidths are those of a grid whose steps are a factor of 1.2. Ours: parameters of two bytes, a third of a step forward, no latency."""
WHY = f"""Why: the authors' simulator has every exchange go beside the backward pass of its step (as its page at arthurdouillard.com/diloco says), ours begins DiLoCo's when the step has ended. So here nothing of an exchange is hidden that has no delay: the less ranks may wait the farther off, and fragments alone gain nothing. With delay ours needs less, since {DELAY} steps are more than the table can have: a fragment of 2 Gbit in one step and a backward pass is 12 Gbit/s, and it has 11 at 99 %."""
DDP = """Li et al., VLDB 2020 (arXiv 2006.15704): overlapping shortens a step of ResNet-50 by 38.0 % and of BERT by 35.2 % on NCCL (section 5, as quoted elsewhere; the paper itself was not at hand), and DDP scales nearly linearly to 256 GPUs (abstract; no number). What a step's computing took is not told, so it is varied: 25 million parameters in fp32, 32 ranks, buckets of 25 MB against one of everything, 12.5 Gbit/s a rank and 14 us a message (eight ranks behind one 100 Gbit/s adapter: an assumption)."""


def section(d: dict[str, Any]) -> str:
    """Returns both checks, with kept and missed claims."""
    return "\n".join([DILOCO, "", _diloco(d["bandwidth"]), DDP, "", _ddp(d["ddp"])])


def _diloco(rows: list[dict[str, Any]]) -> str:
    out, off = [], dict[str, list[float]]()
    for r in rows:
        for share, said, found in zip(SHARES, r["published"], r["predicted"], strict=True):
            off.setdefault(r["method"], []).append(found / said)
            out.append([r["method"], f"{share:.0%}", f"{said:g}", f"{found:.3g}", f"{found / said - 1:+.0%}"])
    every = [ratio for each in off.values() for ratio in each]
    near = sum(1 / (1 + NEAR) <= ratio <= 1 + NEAR for ratio in every)
    order = all(sorted(range(len(rows)), key=lambda i, k=k: rows[i]["predicted"][k]) == sorted(range(len(rows)), key=lambda i, k=k: rows[i]["published"][k])
                for k in (3,))  # fmt: skip
    worst = max(off, key=lambda name: max(max(x, 1 / x) for x in off[name]))
    head = ["method", "computing", "published (Gbit/s)", "predicted (Gbit/s)", "off by"]
    return "\n".join([
        table(head, out),
        f"{near} of {len(every)} are within a factor of {1 + NEAR:g} (asked: all): {_kept(near == len(every))}. At 95 % the methods stand in the published order: {_kept(order)}. Farthest off is {worst}.\n",
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
        table(["computing", "one bucket, after backward", "25 MB, beside it", "shorter by"], out),
        f"Published: {said}. Predicted: at most {most:.1%}, where sending takes as long as backward, so what is published is within reach: {_kept(most >= max(OVERLAP.values()))}; it would be 40 % with buckets of no size, and what is missing is the last bucket, which nothing hides.\n",
        f"From {first} to {last} ranks a step of 180 ms of computing keeps {scale:.0%} of its speed, with a ring; published: nearly linear. What is lost is 2 (p-1) messages of 14 us for each bucket, where NCCL takes trees for many ranks.\n",
    ])  # fmt: skip


def _kept(is_so: bool) -> str:
    return "kept" if is_so else "NOT kept"
