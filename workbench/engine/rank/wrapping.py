"""Wraps a rank's model in torch's own DDP or fully_shard, for strategies that leave the exchange to torch."""

from __future__ import annotations

import gc

from workbench.engine.baselines.torch_ddp import (
    choose_options,
    convert_to_mib,
    remove_hooks,
    require_all_grads,
    wrap_model,
)
from workbench.engine.rank.views import ModelView


def wrap_run_model(run: ModelView) -> None:
    """Wraps the model in torch's own DDP, or a copy in fully_shard. On an emulated Link both use our lane."""
    if run.peers.data is None:
        return
    run.host.hooks.detach_hooks()
    lane = run.lane if run.port.is_active else None
    if run.experiment.strategy.shards:
        from workbench.engine.baselines.fully_sharded import FullySharded  # takes a second to import

        fully = FullySharded(run, run.peers.data, lane)
        run.host.parts.wrap_model(fully.module, fully)
    else:
        options = choose_options(getattr(run.experiment.strategy, "find_unused_parameters", False))
        options["bucket_cap_mb"] = convert_to_mib(run.experiment.bucket_mb)
        with require_all_grads(run.layout):
            run.host.parts.wrap_model(wrap_model(run.model, run.peers.data, options, lane))


def unwrap_run_model(run: ModelView) -> None:
    """Makes forward call the model itself again."""
    remove_hooks(run.host.parts.module)
    fully = run.host.parts.unwrap_model()
    if fully is not None:
        fully.end()
        del fully
        gc.collect()  # torch's hooks and the copy reference each other, and keep shards and sockets
