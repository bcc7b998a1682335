"""Opens the wires of a group of ranks at its first collective.

[Note: Opening beside training] Ranks reach a group's first collective at different times or never, and opening a
process group cannot be interrupted. So each rank first registers in the store. Then it waits until all ranks of the
group have, this rank must leave, or a peer is gone. The store holds one verdict, written once: by the first rank if all
have registered, or by a rank that leaves. Otherwise a rank could leave after another rank has counted it. A torch store
lets only one thread wait at a time, so each opening has its own connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.engine.collectives.lane_wires import GroupWires
from workbench.engine.collectives.shaping import LinkShaper, Port
from workbench.engine.collectives.wire import connect_store, make_meeting_path
from workbench.engine.control.peers import Peers
from workbench.rank import Group


def make_opener(peers: Peers, port: Port, lane: str, kind: str) -> Callable[[Group | None], GroupWires]:
    """Returns a function that opens a group's line of `lane`, over gloo or NCCL. All ranks of the group call it."""

    def opened(group: Group | None) -> GroupWires:
        if len(group or range(port.size)) == 1:
            return GroupWires(None, LinkShaper(port, None, group), None)
        session = peers.session
        tag = f"{lane} {group or 'all'} {group.generation if group else ''}".rstrip()
        ranks = group.ranks if group else tuple(range(port.size))
        (host, at), name = session.store_address, f"{session.generation} {tag}"
        store = connect_store(host, at, name)
        _await_group(store, tag, session.rank.id, ranks, peers.check_peers)
        wire = peers.open_wire(
            tag,
            ranks=ranks,
            store=store,
            precise=session.experiment.precise,
            kind=kind,
            on=session.device,
            is_peer_gone=peers.has_lost_peer,
        )
        aside = wire
        if kind != "gloo" and not peers.local:
            aside = peers.open_wire(f"{tag} arrivals", ranks=ranks, store=store)
        file = f"-{lane}" if group is None else f"-{lane}-{'+'.join(group.dims)}-{group.generation}-{ranks[0]}"
        met = None if group is None or at else Path(make_meeting_path(host, name))
        return GroupWires(wire, LinkShaper(port, peers.make_arrival_table(file, ranks), group), aside, met)

    return opened


def _await_group(store: Any, tag: str, rank: int, ranks: tuple[int, ...], look: Callable[[], None]) -> None:
    """See [Note: Opening beside training].

    look: raises if this rank must leave

    Raises ConnectionError if another rank left first.
    """
    store.set(f"{tag} {rank}", b"here")
    keys, verdict, rest = [f"{tag} {other}" for other in ranks], f"{tag} verdict", 0.001
    while True:
        if rank == ranks[0] and store.check(keys):
            store.compare_set(verdict, "", "open")
        if store.check([verdict]):
            if store.get(verdict) == b"open":
                return
            raise ConnectionError("Connection closed by peer before it had opened its end of a group")
        try:
            look()
        except Exception:
            if store.compare_set(verdict, "", "left") == b"open":
                return  # other ranks now count on this one: it leaves at the group's first collective
            raise
        time.sleep(rest)
        rest = min(2 * rest, 0.05)
