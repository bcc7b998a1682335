"""The compressor family: sums of buckets in fewer bytes. One file per compressor."""

from typing import Any

from workbench.compressors._base import Codec as Codec
from workbench.compressors._base import Coder as Coder
from workbench.compressors._base import Compressor as Compressor
from workbench.compressors._base import inside as inside
from workbench.settings import member, shipped


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
