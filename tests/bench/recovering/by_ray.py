"""Ray Train: restarts all workers, which load the newest checkpoint. As a module: the driver.

After https://docs.ray.io/en/latest/train/user-guides/fault-tolerance.html
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.recovering.starting import SIZE, running

PATIENCE = "300"  # seconds that its processes may take to start, on a busy machine
ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": PATIENCE,
       "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": PATIENCE}  # fmt: skip


@contextmanager
def group(folder: Path, python: str) -> Iterator[None]:
    """Runs a private Ray on this machine, and a driver in it."""
    with running([python, "-m", __name__, str(folder)], folder, **ENV):
        yield


def worker(config: dict[str, Any]) -> None:
    import torch
    from ray import train
    from ray.train import Checkpoint
    from ray.train.torch import prepare_model

    from tests.bench.recovering import training

    plain, optimizer = training.begun()
    step = 0
    if newest := train.get_checkpoint():
        with newest.as_directory() as kept:
            said = torch.load(Path(kept, "state.pt"))
        step = said["step"]
        plain.load_state_dict(said["model"])
        optimizer.load_state_dict(said["optimizer"])
    model, context = prepare_model(plain), train.get_context()

    def save(step: int) -> None:
        with tempfile.TemporaryDirectory() as part:
            if context.get_world_rank() == 0:
                state = {"step": step, "model": plain.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, Path(part, "state.pt"))
            train.report({"step": step}, checkpoint=Checkpoint(part) if context.get_world_rank() == 0 else None)

    training.train(Path(config["folder"]), model, optimizer, step, context.get_world_size(), save)


def main() -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=SIZE + 1, include_dashboard=False)
    kept = RunConfig(storage_path=f"{sys.argv[1]}/ray", failure_config=FailureConfig(max_failures=-1),
                     checkpoint_config=CheckpointConfig(num_to_keep=2))  # fmt: skip
    TorchTrainer(worker, train_loop_config={"folder": sys.argv[1]}, scaling_config=ScalingConfig(num_workers=SIZE),
                 torch_config=TorchConfig(backend="gloo"), run_config=kept).fit()  # fmt: skip


if __name__ == "__main__":
    main()
