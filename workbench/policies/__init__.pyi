# Written by `make tables`, for editors and type checkers.
from workbench.policies._base import Decision as Decision
from workbench.policies._base import Policy as Policy
from workbench.policies._base import PolicyBase as PolicyBase
from workbench.policies._base import Seen as Seen
from workbench.policies.ada_comm import AdaComm as AdaComm
from workbench.policies.by_hand import ByHand as ByHand
from workbench.policies.gravac import GraVAC as GraVAC
from workbench.policies.sync_switch import SyncSwitch as SyncSwitch
