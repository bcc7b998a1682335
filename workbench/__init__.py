"""The workbench: distributed training that is watched and steered while it runs.

The public names are found when they are first asked for, so that `import workbench` and opening a recorded
run need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.compressors import (
        ACPSGD,
        ByteGrad,
        Cast,
        Codec,
        Compressor,
        Dense,
        ErrorFeedback,
        OneBit,
        PowerSGD,
        TopK,
        Zen,
    )
    from workbench.experiment import Experiment
    from workbench.fabric import Fabric, Fault, Freeze, Link, Noisy, Slow, Stumble
    from workbench.knobs import Change, Knob, KnobError, knob
    from workbench.lab import Lab
    from workbench.ops import Bucket, Memory, Rank
    from workbench.optimizers import LAMB, LARS, SGD, Adam, AdamW, Optimizer, TaskOwn
    from workbench.recipes import recipe
    from workbench.run import Run, RunError
    from workbench.sim import Costs, Deadlock, simulate
    from workbench.strategies import (
        BMUF,
        DDP,
        EASGD,
        AsyncModelAverage,
        AsyncServer,
        BackupWorkers,
        BoundedStaleness,
        DiLoCo,
        Gossip,
        Hogwild,
        LocalSGD,
        LowPrecisionDecentralized,
        OneBitAdam,
        QAdam,
        SelSync,
        ShadowMA,
        SlowMo,
        StochasticGradientPush,
        Strategy,
        StreamingDiLoCo,
        TorchDDP,
    )
    from workbench.tasks import ByteGPT, ClickThrough, CriteoTSV, Digits, Task
    from workbench.timeline import Mark, Sample, Span, Timeline

_HOMES = {
    "compressors": (
        "ByteGrad", "Cast", "Codec", "Compressor", "Dense", "ErrorFeedback", "OneBit", "PowerSGD", "TopK", "Zen",
    ),
    "experiment": ("Experiment",),
    "fabric": ("Fabric", "Fault", "Freeze", "Link", "Noisy", "Slow", "Stumble"),
    "knobs": ("Change", "Knob", "KnobError", "knob"),
    "lab": ("Lab",),
    "ops": ("Bucket", "Memory", "Rank"),
    "optimizers": ("LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "TaskOwn"),
    "recipes": ("recipe",),
    "run": ("Run", "RunError"),
    "sim": ("Costs", "Deadlock", "simulate"),
    "strategies": (
        "BMUF", "DDP", "EASGD", "AsyncModelAverage", "AsyncServer", "BackupWorkers", "BoundedStaleness", "DiLoCo",
        "Gossip", "Hogwild", "LocalSGD", "LowPrecisionDecentralized", "OneBitAdam", "QAdam", "SelSync", "ShadowMA",
        "SlowMo", "StochasticGradientPush", "Strategy", "StreamingDiLoCo", "TorchDDP",
    ),
    "tasks": ("ByteGPT", "ClickThrough", "CriteoTSV", "Digits", "Task"),
    "timeline": ("Mark", "Sample", "Span", "Timeline"),
}

__version__ = "0.1.0"
__all__ = [
    "BMUF", "DDP", "EASGD", "LAMB", "LARS", "SGD", "Adam", "AdamW", "AsyncModelAverage", "AsyncServer",
    "BackupWorkers", "BoundedStaleness", "Bucket", "ByteGPT", "ByteGrad", "Cast", "Change", "ClickThrough", "Codec",
    "Compressor", "Costs", "CriteoTSV", "Deadlock", "Dense", "DiLoCo", "Digits", "ErrorFeedback", "Experiment",
    "Fabric", "Fault", "Freeze", "Gossip", "Hogwild", "Knob", "KnobError", "Lab", "Link", "LocalSGD",
    "LowPrecisionDecentralized", "Mark", "Memory", "Noisy", "OneBit", "OneBitAdam", "Optimizer", "PowerSGD", "QAdam",
    "Rank", "Run", "RunError", "Sample", "SelSync", "ShadowMA", "Slow", "SlowMo", "Span", "StochasticGradientPush",
    "Strategy", "StreamingDiLoCo", "Stumble", "Task", "TaskOwn", "Timeline", "TopK", "TorchDDP", "Zen", "knob",
    "recipe", "simulate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"workbench.{home}"), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
