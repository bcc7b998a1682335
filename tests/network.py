"""A real network on one machine: a namespace per rank, with a cable and a rate to one switch.

Linux only; needs root and iproute2. Every name carries a unique token, and leaving the block removes everything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from typing import Any

OURS = "workbench"  # prefix of our namespaces' names
INTERFACE = "eth0"  # name of each rank's port in its namespace
BURST = 1e-3  # seconds of its rate that a port may send at once


class Network:
    """`ranks` namespaces around a switch, each with a full-duplex port with a settable rate.

    A token bucket (tc tbf) limits both ends of every cable, so both directions. The switch is a namespace too, so the
    machine's own interfaces and firewall play no part. `frame` is the largest packet in bytes (the MTU). The kernel
    hands a port pieces of up to 64 kB. If the burst is smaller, they are cut into frames there and counted with every
    frame's header. Otherwise each piece counts one header.
    """

    def __init__(self, ranks: int, frame: int = 9000) -> None:
        self.frame = frame
        token = f"{OURS}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.switch = f"{token}-switch"
        self.names = [f"{token}-{rank}" for rank in range(ranks)]

    def __enter__(self) -> Network:
        sweep()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    @staticmethod
    def address(rank: int) -> str:
        return f"10.90.0.{rank + 1}"

    def command(self, rank: int, argv: list[str]) -> list[str]:
        """Returns `argv` as a command in the namespace of `rank`."""
        return ["ip", "netns", "exec", self.names[rank], *argv]

    def set_rate(self, mbit: float) -> None:
        """Limits every port, in both directions."""
        for rank, name in enumerate(self.names):
            for where, device in ((name, INTERFACE), (self.switch, f"port{rank}")):
                _ask("tc", "-n", where, "qdisc", "replace", "dev", device, "root", "tbf", *self._bucket(mbit))

    def _build(self) -> None:
        _ask("ip", "netns", "add", self.switch)
        _ask("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        _ask("ip", "-n", self.switch, "link", "set", "switch", "up")
        for rank, name in enumerate(self.names):
            port = f"port{rank}"
            _ask("ip", "netns", "add", name)
            _ask("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ask("ip", "-n", self.switch, "link", "set", port, "master", "switch")
            _ask("ip", "-n", name, "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            _ask("ip", "-n", name, "link", "set", "lo", "up")
            for where, device in ((name, INTERFACE), (self.switch, port)):
                _ask("ip", "-n", where, "link", "set", device, "mtu", f"{self.frame}", "up")

    def _bucket(self, mbit: float) -> list[str]:
        """Returns tbf's arguments: the burst is BURST of the rate, at least a frame; the queue never drops."""
        burst = max(int(mbit * 1e6 / 8 * BURST), self.frame + 100)
        return ["rate", f"{mbit:g}mbit", "burst", f"{burst}b", "limit", "64mb"]


def sweep() -> None:
    """Removes the namespaces of killed processes. A namespace's name contains the process's id."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(f"{OURS}-")):
        pid = name.split("-")[1]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ask(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def why_not() -> str:
    """Returns why namespaces cannot be made here, or ""."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "netns: iproute2 is not installed"
    try:
        with Network(1) as network:
            network.set_rate(100)
    except OSError as reason:
        return f"netns: {reason}"
    return ""
