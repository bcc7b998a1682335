"""Compares a DDP rank's memory report with torch's MemTracker in the same step of a real process."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import uuid
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

from tests.bench.ddp import tasks
from tests.ranks import Rows
from workbench.engine.collectives.wire import host_store
from workbench.engine.compute import model
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.memory.storages import list_bucket_vectors

pytestmark = pytest.mark.ranks

WARM = 4  # steps until buckets follow the order of gradients and the optimizer has its state
TOTAL = "Total"


def tracked(rank: int, where: tuple[str, int], name: str, generation: str, out: str) -> None:
    """Runs one rank; MemTracker watches rank 0's last step. Writes both reports into a file."""
    torch.set_num_threads(1)
    e = Experiment(task=tasks()[name], ranks=2, eval_every=0)
    session = Session(e, rank=rank, size=2, store=where, run_id=generation, secret=b"ours", epoch=time.time())
    session.record.close()
    session.record = rows = Rows()
    training = session.set_up()

    def step() -> None:
        training.host.drive_coroutine(training.make_due_changes())
        training.host.drive_coroutine(training.make_step())

    for _ in range(WARM):
        step()
    training.memory_account.recount_standing()
    if rank:
        step()
    else:
        parts, seen, rollback = training.host.parts, {}, training.rollback
        assert rollback is not None
        loss_of, updates = parts.learner.loss, rollback.note_update
        tracker = MemTracker()

        def note(when: str, value: Any) -> Any:
            seen[when] = tracker.get_tracker_snapshot()[torch.device("cpu")]
            return value

        def begin_update() -> None:
            note("backward", None)
            updates()

        batch = training.batches.next_batch()
        training.batches.next_batch = lambda: batch  # type: ignore[method-assign]
        parts.learner = replace(parts.learner, loss=lambda model, x: note("forward", loss_of(model, x)))
        rollback.note_update = begin_update  # type: ignore[method-assign]
        # MemTracker has hooks on gradients, and a rank makes each hook of a model a copy of the gradient
        model.unscale_grads = lambda params, share: nullcontext()  # type: ignore[assignment]
        external = [training.model, training.optimizer, *(batch if isinstance(batch, tuple) else [batch])]
        tracker.track_external(*external, *list_bucket_vectors(training.layout))  # gradients, as soon as they exist
        with tracker:
            step()
            note("update", None)
        theirs = {
            "parameters": seen["update"][_MemRefType.PARAM] + seen["update"][_MemRefType.BUFFER],
            "gradients": seen["backward"][_MemRefType.GRAD],
            "optimizer state": seen["update"][_MemRefType.OPT],
            "activations": seen["forward"][_MemRefType.ACT],
            "peak": tracker.get_tracker_snapshot("peak")[torch.device("cpu")][TOTAL],
        }
        ours = {n.removeprefix("memory "): value for _, n, _, value in rows.samples if n.startswith("memory ")}
        Path(out).write_text(json.dumps({"ours": ours, "theirs": theirs}))
    os._exit(0)


def both(name: str, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Returns (our Ledger's report, MemTracker's report) of a step of DDP on two ranks, in bytes."""
    kept, *where = host_store()
    spawn, out, generation = multiprocessing.get_context("spawn"), folder / "said.json", uuid.uuid4().hex
    rest = tuple(where), name, generation, str(out)
    ranks = [spawn.Process(target=tracked, args=(rank, *rest)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    del kept
    said = json.loads(out.read_text())
    return said["ours"], said["theirs"]


@pytest.mark.parametrize("name", ["ByteGPT", "MLP 8 M"])
def test_the_memory_of_a_ddp_step_is_within_two_percent_of_torchs(name: str, tmp_path: Path) -> None:
    """The optimizer's state is read after the step, because in it MemTracker counts temporaries as state."""
    ours, theirs = both(name, tmp_path)
    for category in ("parameters", "gradients", "optimizer state", "activations", "peak"):
        assert ours[category] == pytest.approx(theirs[category], rel=0.02), category
