"""torchrun: restarts all workers, which load the newest snapshot. As a module: one worker.

After https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.recovering.starting import SIZE, running

# by default workers share the agent's store and read there what earlier workers wrote: pytorch issue 135712
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@contextmanager
def group(folder: Path, python: str) -> Iterator[None]:
    """Runs workers under one agent, which restarts them whenever needed."""
    with running([python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}",
                  "--max-restarts=1000", "-m", __name__, str(folder)], folder, **OWN_STORE):  # fmt: skip
        yield


def main() -> None:
    import torch
    import torch.distributed as dist

    from tests.bench.recovering import training

    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    plain, optimizer = training.begun()
    model, step, snapshot = torch.nn.parallel.DistributedDataParallel(plain), 0, folder / "snapshot.pt"
    if snapshot.exists():
        said = torch.load(snapshot)
        step = said["step"]
        plain.load_state_dict(said["model"])
        optimizer.load_state_dict(said["optimizer"])

    def save(step: int) -> None:
        if dist.get_rank() == 0:
            part = snapshot.with_suffix(".part")
            torch.save({"step": step, "model": plain.state_dict(), "optimizer": optimizer.state_dict()}, part)
            part.replace(snapshot)

    training.train(folder, model, optimizer, step, dist.get_world_size(), save)


if __name__ == "__main__":
    main()
