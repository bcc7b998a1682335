"""A member and its reference on the simulator, for pages that import no simulator."""

from workbench.sim.teach.member_comparison import MemberComparison as MemberComparison
from workbench.sim.teach.member_comparison import compare_member as compare_member
from workbench.sim.teach.member_comparison import find_member as find_member
