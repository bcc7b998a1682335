"""torchft: survivors go on, and a new replica takes its state from them. As a module: one replica.

After torchft's README and train_ddp.py: a lighthouse, and a torchrun for each replica, which restarts it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

from tests.bench.recovering.starting import SIZE, running


def free_ports(count: int) -> list[int]:
    with ExitStack() as open_ones:
        found = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@contextmanager
def group(folder: Path, python: str, limit: int = 5, by: str = "Manager") -> Iterator[None]:
    """Runs the replicas, and a lighthouse that drops a replica after `limit` seconds without a heartbeat.

    limit: also of an all-reduce
    by: whether torchft's DistributedDataParallel averages gradients ("DDP"), or the script, by `Manager.allreduce`
    """
    port, *others = free_ports(1 + SIZE)
    with ExitStack() as stack:
        stack.enter_context(running([
            str(Path(python).parent / "torchft_lighthouse"), f"--bind=[::]:{port}", "--min_replicas=1",
            "--quorum_tick_ms=100", "--join_timeout_ms=10000", f"--heartbeat_timeout_ms={1000 * limit}",
        ], folder))  # fmt: skip
        for number, own in enumerate(others):
            command = [python, "-m", "torch.distributed.run", f"--master-port={own}", "--nnodes=1",
                       "--nproc-per-node=1", "--max-restarts=1000", "-m", __name__, str(folder), by,
                       str(limit)]  # fmt: skip
            stack.enter_context(running(command, folder, REPLICA_GROUP_ID=str(number),
                                        TORCHFT_LIGHTHOUSE=f"http://localhost:{port}"))  # fmt: skip
        yield


def main() -> None:
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from tests.bench.recovering import training

    plain, adam = training.begun()

    def state() -> dict[str, dict[str, object]]:
        return {"model": plain.state_dict(), "optimizer": adam.state_dict()}

    def take(said: dict[str, dict[str, object]]) -> None:
        plain.load_state_dict(said["model"])
        adam.load_state_dict(said["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=int(sys.argv[3]))), timeout=timedelta(seconds=10),
        replica_id=f"recovering_{os.environ['REPLICA_GROUP_ID']}", min_replica_size=1, load_state_dict=take,
        state_dict=state,
    )  # fmt: skip
    wrapped = sys.argv[2] == "DDP"
    model, optimizer = DistributedDataParallel(manager, plain) if wrapped else plain, Optimizer(manager, adam)

    def mean() -> None:
        """Averages the gradients as one bucket; the manager reports errors."""
        gradients = [p.grad for p in plain.parameters()]
        flat = torch.cat([g.flatten() for g in gradients])
        manager.allreduce(flat).wait()
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    with training.writing(Path(sys.argv[1])) as write:
        while True:
            step = manager.current_step()
            optimizer.zero_grad()
            training.loss(model).backward()
            if not wrapped:
                mean()
            optimizer.step()
            if manager.current_step() == step:
                write("failed", step, manager.num_participants())
            elif manager.is_participating():  # a replica without its state yet adds nothing to the sum
                write("made", manager.current_step(), manager.num_participants())


if __name__ == "__main__":
    main()
