"""What crosses the wire instead of a bucket: one compressor per file."""

from workbench.compressors._base import Codec as Codec
from workbench.compressors._base import Compressor as Compressor
from workbench.compressors._base import inside as inside
from workbench.compressors.byte_grad import ByteGrad as ByteGrad
from workbench.compressors.cast import Cast as Cast
from workbench.compressors.dense import Dense as Dense
from workbench.compressors.error_feedback import ErrorFeedback as ErrorFeedback
from workbench.compressors.one_bit import OneBit as OneBit
from workbench.compressors.power_sgd import PowerSGD as PowerSGD
from workbench.compressors.random_k import RandomK as RandomK
from workbench.compressors.sampled_top_k import SampledTopK as SampledTopK
from workbench.compressors.sidco import SIDCo as SIDCo
from workbench.compressors.threshold import Threshold as Threshold
from workbench.compressors.top_k import TopK as TopK
from workbench.compressors.wangni import Wangni as Wangni

__all__ = [
    "ByteGrad",
    "Cast",
    "Codec",
    "Compressor",
    "Dense",
    "ErrorFeedback",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SIDCo",
    "SampledTopK",
    "Threshold",
    "TopK",
    "Wangni",
    "inside",
]
