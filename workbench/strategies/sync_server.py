"""A synchronous parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.strategies.async_server import AsyncServer


@dataclass(frozen=True, kw_only=True)
class SyncServer(AsyncServer):
    """Ranks push their displacements to a server and wait until the server has applied those of all ranks.

        trainer:  params_i <- optimizer_i(params_i, grad_i)                   every step
                  push d_i = params_i - base_i                                every `push` steps
                  params_i <- centre + params_i - base_i;   base_i <- centre  every `fetch` steps
        server:   v <- m v + w sum_i d_i;   centre <- centre + r v;   version <- version + 1      once all have asked

    It has AsyncServer's bytes and roles. But all ranks wait for the slowest. So no push is stale, and all ranks have
    the same version. With w = 1/p ("mean"), plain SGD and `push` = `fetch` = 1 it is DDP through a server. The server's
    port is the bottleneck, because it receives and sends p times the model per step. With an all-reduce each rank sends
    2 (p-1)/p of it.

    When to use it: to see the method that the all-reduce has replaced, and that BackupWorkers and BoundedStaleness
    improve. More servers share the load. Pushes begin after the step, so no push hides behind backward.

    Reference: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
    https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu; the comparison with stale pushes:
    Chen et al., "Revisiting Distributed Synchronous SGD", 2016, https://arxiv.org/abs/1604.00981
    """

    waits: ClassVar[bool] = True

    def propagation(self, size: int) -> int:
        return min(self.push, self.fetch) + 1
