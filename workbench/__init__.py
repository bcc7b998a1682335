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
        ALQ,
        AMQ,
        DGC,
        NUQSGD,
        QSGD,
        Accordion,
        ByteGrad,
        Cast,
        Codec,
        Compressor,
        Dense,
        EFSignSGD,
        ErrorFeedback,
        Float8,
        GTopK,
        Layers,
        LGreCo,
        OkTopK,
        OneBit,
        PowerSGD,
        RandomK,
        SampledTopK,
        ScaleCom,
        SIDCo,
        SignSGD,
        TernGrad,
        Threshold,
        TopK,
        Wangni,
        WarmUp,
        Zen,
    )
    from workbench.experiment import Experiment
    from workbench.experiment.recipes import recipe
    from workbench.fabric import Fabric, Fault, Freeze, Link, Noisy, Slow, Stumble
    from workbench.lab import Lab
    from workbench.optimizers import LAMB, LARS, SGD, Adam, AdamW, Optimizer, TaskOwn
    from workbench.rank import Bucket, Memory, Rank
    from workbench.record.timeline import Mark, Sample, Span, Timeline
    from workbench.run import Run, RunError, simulate
    from workbench.settings import Change, Knob, KnobError, knob
    from workbench.sim import Costs, Deadlock
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

_HOMES = {
    "compressors": (
        "Accordion",
        "ACPSGD",
        "ALQ",
        "AMQ",
        "ByteGrad",
        "Cast",
        "Codec",
        "Compressor",
        "Dense",
        "DGC",
        "EFSignSGD",
        "ErrorFeedback",
        "Float8",
        "GTopK",
        "Layers",
        "LGreCo",
        "NUQSGD",
        "OkTopK",
        "OneBit",
        "PowerSGD",
        "QSGD",
        "RandomK",
        "SampledTopK",
        "ScaleCom",
        "SIDCo",
        "SignSGD",
        "TernGrad",
        "Threshold",
        "TopK",
        "Wangni",
        "WarmUp",
        "Zen",
    ),
    "experiment": ("Experiment",),
    "fabric": ("Fabric", "Fault", "Freeze", "Link", "Noisy", "Slow", "Stumble"),
    "lab": ("Lab",),
    "rank": ("Bucket", "Memory", "Rank"),
    "optimizers": ("LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "TaskOwn"),
    "experiment.recipes": ("recipe",),
    "run": ("Run", "RunError", "simulate"),
    "settings": ("Change", "Knob", "KnobError", "knob"),
    "sim": ("Costs", "Deadlock"),
    "strategies": (
        "BMUF",
        "DDP",
        "EASGD",
        "AsyncModelAverage",
        "AsyncServer",
        "BackupWorkers",
        "BoundedStaleness",
        "DiLoCo",
        "Gossip",
        "Hogwild",
        "LocalSGD",
        "LowPrecisionDecentralized",
        "OneBitAdam",
        "QAdam",
        "SelSync",
        "ShadowMA",
        "SlowMo",
        "StochasticGradientPush",
        "Strategy",
        "StreamingDiLoCo",
        "TorchDDP",
    ),
    "tasks": ("ByteGPT", "ClickThrough", "CriteoTSV", "Digits", "Task"),
    "record.timeline": ("Mark", "Sample", "Span", "Timeline"),
}

__version__ = "0.1.0"
__all__ = [
    "ACPSGD", "ALQ", "AMQ", "BMUF", "DDP", "DGC", "EASGD", "LAMB", "LARS", "NUQSGD", "QSGD", "SGD", "Accordion",
    "Adam", "AdamW", "AsyncModelAverage", "AsyncServer", "BackupWorkers", "BoundedStaleness", "Bucket", "ByteGPT",
    "ByteGrad", "Cast", "Change", "ClickThrough", "Codec", "Compressor", "Costs", "CriteoTSV", "Deadlock", "Dense",
    "DiLoCo", "Digits", "EFSignSGD", "ErrorFeedback", "Experiment", "Fabric", "Fault", "Float8", "Freeze", "GTopK",
    "Gossip", "Hogwild", "Knob", "KnobError", "LGreCo", "Lab", "Layers", "Link", "LocalSGD",
    "LowPrecisionDecentralized", "Mark", "Memory", "Noisy", "OkTopK", "OneBit", "OneBitAdam", "Optimizer",
    "PowerSGD", "QAdam", "RandomK", "Rank", "Run", "RunError", "SIDCo", "Sample", "SampledTopK", "ScaleCom",
    "SelSync", "ShadowMA", "SignSGD", "Slow", "SlowMo", "Span", "StochasticGradientPush", "Strategy",
    "StreamingDiLoCo", "Stumble", "Task", "TaskOwn", "TernGrad", "Threshold", "Timeline", "TopK", "TorchDDP",
    "Wangni", "WarmUp", "Zen", "knob", "recipe", "simulate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"workbench.{home}"), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
