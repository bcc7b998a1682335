# Written by `make tables`, for editors and type checkers.
from workbench.fabric._base import Fault as Fault
from workbench.fabric.algorithms._base import Algorithm as Algorithm
from workbench.fabric.algorithms._base import Among as Among
from workbench.fabric.crash import Crash as Crash
from workbench.fabric.fabric import Fabric as Fabric
from workbench.fabric.freeze import Freeze as Freeze
from workbench.fabric.hops import Ways as Ways
from workbench.fabric.hops import hop_seconds as hop_seconds
from workbench.fabric.link import Link as Link
from workbench.fabric.link import Load as Load
from workbench.fabric.link import even as even
from workbench.fabric.link import traffic as traffic
from workbench.fabric.link import uneven as uneven
from workbench.fabric.noisy import Noisy as Noisy
from workbench.fabric.slow import Slow as Slow
from workbench.fabric.transient_straggler import TransientStraggler as TransientStraggler
