"""What an algorithm may ask of the rank that it runs on, and the values that pass between them. No clock, no wire."""

from workbench.rank.bucket import MOMENTUM as MOMENTUM
from workbench.rank.bucket import Bucket as Bucket
from workbench.rank.bucket import Memory as Memory
from workbench.rank.bucket import Part as Part
from workbench.rank.ops import REDUCTIONS as REDUCTIONS
from workbench.rank.ops import Backward as Backward
from workbench.rank.ops import Forward as Forward
from workbench.rank.ops import Handle as Handle
from workbench.rank.ops import Op as Op
from workbench.rank.ops import Rank as Rank
from workbench.rank.ops import StrategyError as StrategyError
from workbench.rank.ops import message as message

__all__ = [
    "MOMENTUM", "REDUCTIONS", "Backward", "Bucket", "Forward", "Handle", "Memory", "Op", "Part", "Rank",
    "StrategyError", "message",
]  # fmt: skip
