"""The network and its faults, as descriptions for the engine and the simulator."""

from typing import Any

from workbench.fabric._base import Fault as Fault
from workbench.fabric.algorithms._base import Algorithm as Algorithm
from workbench.fabric.algorithms._base import Among as Among
from workbench.fabric.fabric import Fabric as Fabric
from workbench.fabric.hops import Ways as Ways
from workbench.fabric.hops import hop_seconds as hop_seconds
from workbench.fabric.link import Link as Link
from workbench.fabric.link import Load as Load
from workbench.fabric.link import even as even
from workbench.fabric.link import traffic as traffic
from workbench.fabric.link import uneven as uneven
from workbench.settings import member, shipped


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
