"""Opens a rank's lanes, and performs their children's ops beyond collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.engine.collectives.child_job import ChildJob, LaneCalls
from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.lane_wires import GroupWires
from workbench.engine.collectives.shaping import Port
from workbench.engine.collectives.stopwatch import Stopwatch
from workbench.engine.compute.offload import OffloadTransfers
from workbench.engine.control.group_wires import make_opener
from workbench.engine.control.peers import Peers
from workbench.engine.device import Chip
from workbench.engine.p2p.mailbox import FROM_BACKGROUND, Mailbox
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.memory.offload import OFFLOAD_LANES
from workbench.rank import Op, StrategyError


class LaneOpener:
    """wait: waits for a child's handle"""

    def __init__(self, kind: str, peers: Peers, port: Port, mailbox: Mailbox, watch: Stopwatch, chip: Chip,
                 away: OffloadTransfers, memory_account: MemoryAccount, wait: Callable[..., Any]) -> None:  # fmt: skip
        self._kind, self._peers, self._port, self._mailbox = kind, peers, port, mailbox
        self._watch, self._chip, self._away, self._buffers, self._wait = watch, chip, away, memory_account.buffers, wait

    def open_lane(self, name: str, whole: GroupWires | None = None,
                  on_child_start: Callable[[int], None] = lambda number: None) -> Lane:  # fmt: skip
        """Its wires open at first use."""
        kind = self._kind
        if kind != "gloo" and name not in ("comm", *OFFLOAD_LANES):
            raise StrategyError(f"lane {name!r}: over {kind} all children run on one lane, 'comm'; start it there")
        verbs = dict.fromkeys((*self._away.verbs, "update"), self._perform_wireless)
        verbs["wait"] = lambda op, job: self._wait(*op.args)
        calls = LaneCalls(
            on_child_start, self._buffers.note_request, self._buffers.note_end, perform_hop=self.perform_hop,
            wireless=verbs,
        )  # fmt: skip
        wireless = name in OFFLOAD_LANES
        if wireless:
            calls = calls._replace(read_settings=self._away.update_settings)
        opener = make_opener(self._peers, self._port, name, kind)
        return Lane(name, self._port, self._watch, self._chip, opener, whole, calls, wireless=wireless)

    def perform_hop(self, op: Op, step: int) -> Any:
        """A message of an all-reduce on a lane. It belongs to no step, so no meeting counts it."""
        if op.verb == "send":
            x, to, kind = op.args
            return self._mailbox.send(x, to, kind, FROM_BACKGROUND, step=step)
        into, source, kind = op.args
        return self._mailbox.recv(into, source, kind, self._check_with_grace)

    def _check_with_grace(self) -> bool:
        """Raises if this rank must leave, or if a peer has been gone for a while. Nothing else ends such a wait."""
        self._peers.check_with_grace()
        return False

    def _perform_wireless(self, op: Op, job: ChildJob) -> Any:
        if op.verb == "update" and op.args[2] != "host":
            raise StrategyError("a child requested an update on the device: request it in `step`, or with on='host'")
        return self._away.perform_op(op, job.step, job.optimizer_settings)
