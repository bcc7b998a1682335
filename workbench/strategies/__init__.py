"""How ranks agree: one strategy per file, each a frozen dataclass with one coroutine."""

from workbench.strategies._base import Strategy as Strategy
from workbench.strategies.async_model_average import AsyncModelAverage as AsyncModelAverage
from workbench.strategies.async_server import AsyncServer as AsyncServer
from workbench.strategies.backup_workers import BackupWorkers as BackupWorkers
from workbench.strategies.bmuf import BMUF as BMUF
from workbench.strategies.bounded_staleness import BoundedStaleness as BoundedStaleness
from workbench.strategies.ddp import DDP as DDP
from workbench.strategies.diloco import DiLoCo as DiLoCo
from workbench.strategies.easgd import EASGD as EASGD
from workbench.strategies.gossip import Gossip as Gossip
from workbench.strategies.hogwild import Hogwild as Hogwild
from workbench.strategies.local_sgd import LocalSGD as LocalSGD
from workbench.strategies.low_precision_decentralized import LowPrecisionDecentralized as LowPrecisionDecentralized
from workbench.strategies.one_bit_adam import OneBitAdam as OneBitAdam
from workbench.strategies.q_adam import QAdam as QAdam
from workbench.strategies.selsync import SelSync as SelSync
from workbench.strategies.shadow_ma import ShadowMA as ShadowMA
from workbench.strategies.slowmo import SlowMo as SlowMo
from workbench.strategies.stochastic_gradient_push import StochasticGradientPush as StochasticGradientPush
from workbench.strategies.streaming_diloco import StreamingDiLoCo as StreamingDiLoCo
from workbench.strategies.torch_ddp import TorchDDP as TorchDDP

__all__ = [
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
]
