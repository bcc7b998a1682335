"""What crosses the wire instead of a bucket: one compressor per file."""

from workbench.compressors._base import Codec as Codec
from workbench.compressors._base import Compressor as Compressor
from workbench.compressors._base import inside as inside
from workbench.compressors.accordion import Accordion as Accordion
from workbench.compressors.acp_sgd import ACPSGD as ACPSGD
from workbench.compressors.alq import ALQ as ALQ
from workbench.compressors.amq import AMQ as AMQ
from workbench.compressors.byte_grad import ByteGrad as ByteGrad
from workbench.compressors.cast import Cast as Cast
from workbench.compressors.dense import Dense as Dense
from workbench.compressors.dgc import DGC as DGC
from workbench.compressors.ef_sign_sgd import EFSignSGD as EFSignSGD
from workbench.compressors.error_feedback import ErrorFeedback as ErrorFeedback
from workbench.compressors.float8 import Float8 as Float8
from workbench.compressors.g_top_k import GTopK as GTopK
from workbench.compressors.l_greco import LGreCo as LGreCo
from workbench.compressors.layers import Layers as Layers
from workbench.compressors.nuqsgd import NUQSGD as NUQSGD
from workbench.compressors.ok_top_k import OkTopK as OkTopK
from workbench.compressors.one_bit import OneBit as OneBit
from workbench.compressors.power_sgd import PowerSGD as PowerSGD
from workbench.compressors.qsgd import QSGD as QSGD
from workbench.compressors.random_k import RandomK as RandomK
from workbench.compressors.sampled_top_k import SampledTopK as SampledTopK
from workbench.compressors.scale_com import ScaleCom as ScaleCom
from workbench.compressors.sidco import SIDCo as SIDCo
from workbench.compressors.sign_sgd import SignSGD as SignSGD
from workbench.compressors.tern_grad import TernGrad as TernGrad
from workbench.compressors.threshold import Threshold as Threshold
from workbench.compressors.top_k import TopK as TopK
from workbench.compressors.wangni import Wangni as Wangni
from workbench.compressors.warm_up import WarmUp as WarmUp
from workbench.compressors.zen import Zen as Zen

__all__ = [
    "ACPSGD",
    "ALQ",
    "AMQ",
    "DGC",
    "NUQSGD",
    "QSGD",
    "Accordion",
    "ByteGrad",
    "Cast",
    "Codec",
    "Compressor",
    "Dense",
    "EFSignSGD",
    "ErrorFeedback",
    "Float8",
    "GTopK",
    "LGreCo",
    "Layers",
    "OkTopK",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SIDCo",
    "SampledTopK",
    "ScaleCom",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "Wangni",
    "WarmUp",
    "Zen",
    "inside",
]
