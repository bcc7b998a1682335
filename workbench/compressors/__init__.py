"""What crosses the wire instead of a bucket: one compressor per file."""

from workbench.compressors._base import Codec as Codec
from workbench.compressors._base import Compressor as Compressor
from workbench.compressors._base import inside as inside
from workbench.compressors.byte_grad import ByteGrad as ByteGrad
from workbench.compressors.cast import Cast as Cast
from workbench.compressors.dense import Dense as Dense
from workbench.compressors.dgc import DGC as DGC
from workbench.compressors.error_feedback import ErrorFeedback as ErrorFeedback
from workbench.compressors.g_top_k import GTopK as GTopK
from workbench.compressors.ok_top_k import OkTopK as OkTopK
from workbench.compressors.one_bit import OneBit as OneBit
from workbench.compressors.power_sgd import PowerSGD as PowerSGD
from workbench.compressors.scale_com import ScaleCom as ScaleCom
from workbench.compressors.top_k import TopK as TopK

__all__ = [
    "DGC",
    "ByteGrad",
    "Cast",
    "Codec",
    "Compressor",
    "Dense",
    "ErrorFeedback",
    "GTopK",
    "OkTopK",
    "OneBit",
    "PowerSGD",
    "ScaleCom",
    "TopK",
    "inside",
]
