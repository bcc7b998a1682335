"""How ranks agree: one strategy per file, each a frozen dataclass with one coroutine."""

from workbench.strategies._base import Strategy as Strategy
from workbench.strategies.async_model_average import AsyncModelAverage as AsyncModelAverage
from workbench.strategies.async_server import AsyncServer as AsyncServer
from workbench.strategies.ddp import DDP as DDP
from workbench.strategies.gossip import Gossip as Gossip
from workbench.strategies.local_sgd import LocalSGD as LocalSGD
from workbench.strategies.low_precision_decentralized import LowPrecisionDecentralized as LowPrecisionDecentralized
from workbench.strategies.shadow_ma import ShadowMA as ShadowMA
from workbench.strategies.stochastic_gradient_push import StochasticGradientPush as StochasticGradientPush
from workbench.strategies.torch_ddp import TorchDDP as TorchDDP

__all__ = [
    "DDP",
    "AsyncModelAverage",
    "AsyncServer",
    "Gossip",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "ShadowMA",
    "StochasticGradientPush",
    "Strategy",
    "TorchDDP",
]
