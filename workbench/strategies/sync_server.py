"""A synchronous parameter server: it answers once every rank that trains has asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.strategies.async_server import AsyncServer


@dataclass(frozen=True, kw_only=True)
class SyncServer(AsyncServer):
    """Ranks push what they have moved to a server and wait until it has taken in what all have pushed.

        trainer:  params_i <- optimizer_i(params_i, grad_i)                   every step
                  push d_i = params_i - base_i                                every `push` steps
                  params_i <- centre + params_i - base_i;   base_i <- centre  every `fetch` steps
        server:   v <- m v + w sum_i d_i;   centre <- centre + r v;   version <- version + 1      once all have asked

    AsyncServer's bytes and roles; but everybody waits for the slowest, no push is ever stale, and one version stands
    for all of them. With w = 1/p ("mean"), plain SGD and `push` = `fetch` = 1 it is DDP through a server, whose port is
    the narrow place: it takes in and sends out p times the model per step, where an all-reduce has 2 (p-1)/p of it
    at each rank.

    When to use it: to see what the all-reduce has replaced, and what BackupWorkers and BoundedStaleness then mend. More
    servers share the load; pushes begin when the step has been made, so none of it hides behind backward.

    Reference: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
    https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu; the comparison with stale pushes:
    Chen et al., "Revisiting Distributed Synchronous SGD", 2016, https://arxiv.org/abs/1604.00981
    """

    waits: ClassVar[bool] = True

    def propagation(self, size: int) -> int:
        return min(self.push, self.fetch) + 1
