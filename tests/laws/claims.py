"""Facts about single strategies, in addition to their claims, for the laws.

An entry makes a law stricter (the paper's formula for bytes) or exempts a strategy with a reason. A strategy without an
entry must still pass every law.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.fabric import traffic


def dense(sizes: list[int]) -> int:
    """Returns the bytes of one all-reduce of every bucket."""
    return sum(traffic("all_reduce", n, 4)[0] for n in sizes)


# bytes that rank 0 of 4 sends in step 7 with the usual knobs, from the buckets' bytes
SENT: dict[str, Callable[[list[int]], int]] = {
    **dict.fromkeys(
        (
            "BMUF",
            "ByteScheduler",
            "DDP",
            "DiLoCo",
            "EASGD",
            "LocalSGD",
            "OneBitAdam",
            "PostLocalSGD",
            "QAdam",
            "SlowMo",
            "Wavelet",
        ),
        dense,
    ),
    "AdaAlter": lambda sizes: 2 * dense(sizes),
    "DABMD": lambda sizes: 2 * (sum(sizes) + 8),
    "Gossip": lambda sizes: 2 * sum(sizes),
    "Newton": lambda sizes: 11 * dense(sizes) + traffic("all_reduce", 5 * 8, 4)[0],  # g, ten products; five losses
    "HierarchicalLocalSGD": lambda sizes: dense(sizes),  # all ranks exchange in that step, groups in the other steps
    "LowPrecisionDecentralized": lambda sizes: 2 * sum(n // 4 + 8 for n in sizes),
    "SelSync": lambda sizes: dense(sizes) + traffic("all_reduce", 8, 4)[0],
    "StochasticGradientPush": lambda sizes: sum(sizes) + 8,
    "StreamingDiLoCo": lambda sizes: 2 * 3 * (4 + 576 // 4 // 2),  # the 576 elements of layer a: scales and half bytes
    **dict.fromkeys(("ZeRO1", "ZeRO2"), lambda sizes: sum(2 * 3 * 4 * -(-n // 16) for n in sizes)),  # fp32 shards of 4
}

# asynchronous strategies whose messages are coded: a bucket's bytes in a message, from its bytes in fp32
CODED: dict[str, Callable[[int], int]] = {
    # half of the units of layer a: half of b's columns, and in the other bucket half of a's 576 elements
    "AsyncDrop": lambda n: n // 2 if n == 4 * 64 * 64 else n - 4 * 576 // 2,
    # indices of a quarter of the entries; norms and codes in blocks of equal length, of at most 64
    "TEASQFed": lambda n: 4 * (k := round(n // 4 / 4)) + (blocks := -(-k // 64)) * (4 + -(-k // blocks)),
}

# strategies that send nothing, and why
SILENT = {"Hogwild": "all ranks have their parameters in one memory"}

# strategies in which each rank makes a whole step: p ranks move p times as far, so laws give them 1/p of the rate
SUMS = {"BoundedStaleness", "Hogwild"}

# strategies that are not `plain`, and the multiple of the optimizer's rate at which they learn equally well
RATES: dict[str, float] = {
    "AdaAlter": 500.0,  # the task's rate is Adam's; here a root that begins near 1 divides
    "AsyncDrop": 3.0,  # a task trains half of the units with a new optimizer, and counts for half
    "BMUF": 1.0, "DABMD": 1.0, "DiLoCo": 1.0, "EASGD": 1.0, "KFAC": 3.0, "Newton": 3.0,
    "OneBitAdam": 1.0, "QAdam": 1.0,
    "ShadowBMUF": 1.0, "ShadowEASGD": 1.0, "SlowMo": 1.0, "StreamingDiLoCo": 1.0, "TEASQFed": 1.0, "Wavelet": 1.0,
}  # fmt: skip

# strategies that end with an outer or centre value instead of the ranks' mean, or whose rounds end in an outer value
# that momentum has moved beyond the mean
ADOPTS: set[str] = {"BMUF", "DiLoCo", "EASGD", "ShadowEASGD", "ShadowSync", "SlowMo", "StreamingDiLoCo"}

# strategies with exchanges that overtake each other, so that their order depends on those available
URGENT = {"ByteScheduler"}

# strategies that round the values they mix, so that the mean of the ranks moves as they converge
ROUNDS = {"LowPrecisionDecentralized"}

# (strategy, knob): other settings that the knob needs to have an effect, and the value to set
TURNED: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("DABMD", "edges"): ({}, "0-1 1-2 2-3"),  # 3 is no graph
    ("Gossip", "edges"): ({}, "0-1 1-2 2-3"),  # 3 is no graph
    ("HierarchicalLocalSGD", "group"): ({}, 1),  # 3 would not divide the ranks
    ("HSDP", "group"): ({}, 4),  # 3 would not divide the ranks
    ("HierarchicalLocalSGD", "warmup"): ({}, 9),  # a past warm-up has ended
    ("KFAC", "decay"): ({"factors_every": 1, "inverses_every": 1}, 0.1),
    ("PostLocalSGD", "warmup"): ({"warmup": 0}, 9),
    ("PostLocalSGD", "every"): ({"warmup": 0}, 3),
    ("PostLocalSGD", "momentum"): ({"warmup": 0}, "average"),
    ("SelSync", "delta"): ({"window": 2}, 1e6),  # until the window is full every step synchronises
    ("SelSync", "window"): ({"window": 2, "delta": 1e6}, 9),
    ("SelSync", "norm_window"): ({"window": 2, "delta": 0.1}, 8),
    ("SelSync", "smoothing"): ({"window": 4, "delta": 0.5}, 0.9),
    ("SelSync", "inject_ranks"): ({}, 0.5),  # 3 is no share
    ("SelSync", "inject_share"): ({"inject_ranks": 0.5}, 1.0),
    ("StochasticGradientPush", "edges"): ({}, "0>1 1>2 2>3 3>0"),
    ("ZeROOffload", "delayed"): ({"delay_from": 0}, True),
    ("ZeROOffload", "delay_from"): ({"delayed": True, "delay_from": 0}, 9),
}

# knobs that only change when something happens or its memory, and the test that shows the effect
WHEN = {
    ("TorchDDP", "find_unused_parameters"): "tests/laws/test_dynamic_models.py",
    **{(name, "outstanding"): "tests/unit/test_zero.py" for name in ("ZeRO1", "ZeRO2", "ZeRO3", "HSDP", "HpZ")},
    **{(name, "prefetch"): "tests/unit/test_zero_3.py" for name in ("ZeRO3", "HSDP", "HpZ")},
    **{(name, "outstanding"): "tests/unit/test_offload.py" for name in ("ZeROOffload", "ZeROInfinity")},
    **{("ZeROInfinity", knob): "tests/unit/test_offload.py" for knob in ("prefetch", "on")},
    ("DABMD", "mirror"): "tests/golden/test_dabmd.py",  # the other map needs parameters above 0
    **{("Wavelet", knob): "tests/unit/test_wavelet.py" for knob in ("pieces", "lead")},
    **{("ByteScheduler", knob): "tests/unit/test_byte_scheduler.py" for knob in ("partition_mb", "credit_mb", "order")},
    **{(f"ShadowSync{form}", "piece_kb"): "tests/golden/test_shadow_sync_averaging.py" for form in ("", "BMUF", "MA")},
    ("HpZ", "group"): "tests/unit/test_hsdp.py",  # the laws' small model stays whole from forward to backward
}

# asynchronous strategies in which one rank may receive the model more often than another, and why
AT_NEED = {
    "BoundedStaleness": "a rank fetches when its copy is too old, not in every step",
    **dict.fromkeys(("ShadowEASGD", "ShadowSync"), "each shadow meets the servers at a pace of its own"),
}
