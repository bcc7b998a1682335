"""Tests checkpoints on real ranks on threads: exact resumption, other ranks, failing disks."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.kept import held, lived, same, twice
from tests.piped import piped
from tests.ranks import batch, ended, experiment, live, mse, net, toy, weights
from tests.waiting import until
from workbench.compressors import TopK
from workbench.engine.rank.checkpoints import CheckpointWriter
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.fabric import Slow
from workbench.host.checkpoint import piece_files as filing
from workbench.host.checkpoint.model_export import _compute_digest
from workbench.host.checkpoint.rank_image import RankImage
from workbench.host.checkpoint.value_encoding import ValueDecoder, encode_value
from workbench.optimizers import AdamW
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.partitions.schedules import PipeDream
from workbench.record.checkpoints import FOLDER, MANIFEST, Checkpoint, list_checkpoints, name, prune, seal_manifest
from workbench.record.drafts import Draft
from workbench.settings import Change, KnobError
from workbench.sim.run.resuming import gather_checkpoint, plan_resume
from workbench.strategies import DDP, DiLoCo, LocalSGD, ShadowSync, TorchDDP, TorchFSDP, ZeRO3, ZeROInfinity
from workbench.tasks import ClickThrough

pytestmark = pytest.mark.ranks

EXPERIMENTS = {
    "DDP": experiment(3, 20),
    "one rank": experiment(1, 20),
    "LocalSGD in a round": experiment(3, 20, strategy=LocalSGD(every=4)),
    "ZeRO3": experiment(3, 20, strategy=ZeRO3(), optimizer=AdamW()),
    "ZeROInfinity": experiment(2, 20, strategy=ZeROInfinity(), optimizer=AdamW()),
    "TopK": experiment(3, 20, compressor=TopK.usual()),
    "AdamW while the rate rises": experiment(3, 20, optimizer=AdamW(), lr_warmup=15, clip=0.5, eval_every=3),
    "TorchDDP": experiment(2, 20, strategy=TorchDDP()),
    "TorchFSDP": experiment(2, 20, strategy=TorchFSDP(), optimizer=AdamW()),
    "stages": piped(4, 20, partition=Pipeline(), strategy=LocalSGD(every=4), compressor=TopK.usual()),
    "stages that never flush": piped(4, 20, partition=Pipeline(schedule=PipeDream(), micros=1)),
    "slices": piped(4, 20, partition=Tensor()),
}


def said(sessions: list[Session], mark: str) -> list[dict[str, Any]]:
    return [json.loads(row[3]) for s in sessions for row in s.record.noted(mark)]


def test_tensors_with_strides_are_kept_exactly() -> None:
    """Also one number of a column: nothing needs its stride, but torch keeps it."""
    rows = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    image, apart = RankImage(step=0), [rows[:1, 1], rows[:, 2], rows.T, rows[1, 2]]
    for x in apart:
        image.add_own(x)
    kept = [x for item in filing.hash_pieces(image) for _, x in item]
    assert all(torch.equal(one, x) for one, x in zip(kept, apart, strict=True))
    assert _compute_digest([rows[:1, 1]]) == _compute_digest([rows[:1, 1].clone(memory_format=torch.contiguous_format)])


@pytest.mark.parametrize("label", EXPERIMENTS)
def test_a_resumed_run_is_bit_identical(label: str, tmp_path: Path) -> None:
    whole, rest = twice(EXPERIMENTS[label], tmp_path, 10)
    late = [[v for step, kind, _, v in s.record.samples if kind == "loss" and step >= 10] for s in whole]
    assert [s.record.losses() for s in rest] == late and len(late[0]) == 10
    assert same(held(whole), held(rest))
    assert not said([*whole, *rest], "not saved") and not said(rest, "data")


def test_a_checkpoint_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    e = experiment(2, 12, strategy=LocalSGD(every=5), compressor=TopK.usual())
    saves = lived(replace(e, save_every=4), tmp_path / "a")
    assert same(held(saves), held(lived(e, tmp_path / "b")))


def test_a_checkpoint_contains_the_planned_changes_to_come(tmp_path: Path) -> None:
    changes = (Change(3, "lr", 0.01), Change(15, "strategy", "LocalSGD"), Change(17, "batch", 8))
    whole = lived(replace(EXPERIMENTS["DDP"], save_every=10), tmp_path / "a", changes=changes)
    kept = Checkpoint.open(list_checkpoints(tmp_path / "a" / FOLDER)[0])
    begun = plan_resume(kept, replace(kept_settings(kept), save_every=10))
    assert [(c.at_step, c.path) for c in begun.changes] == [(15, "strategy"), (17, "batch")]
    rest = lived(begun.experiment, tmp_path / "b", kept.path, begun.changes)
    assert same(held(whole), held(rest))


def test_a_checkpoint_contains_past_changes_once_and_policies_see_them(tmp_path: Path) -> None:
    """Otherwise rank 0 would collect all ranks' lists of all changes: tens of MB for the 700 changes of an hour."""
    changes = tuple(Change(step, "lr", step / 1000) for step in range(2, 9))
    whole = lived(replace(EXPERIMENTS["DDP"], save_every=10), tmp_path / "a", changes=changes)
    first = list_checkpoints(tmp_path / "a" / FOLDER)[0]
    text = (first / MANIFEST).read_text()
    assert [text.count(f"planned {change.at_step}") for change in changes] == [1] * len(changes)
    rest = lived(replace(EXPERIMENTS["DDP"], save_every=10), tmp_path / "b", first)
    for s in (*whole, *rest):
        assert [(c.at_step, c.path, c.value) for c in s.training.policy_runner.made] == [
            (c.at_step, "lr", c.value) for c in changes]  # fmt: skip


def test_checkpoints_of_the_older_format_are_read(tmp_path: Path) -> None:
    lived(replace(EXPERIMENTS["DDP"], save_every=10), tmp_path / "a", changes=(Change(4, "lr", 0.004),))
    kept = Checkpoint.open(list_checkpoints(tmp_path / "a" / FOLDER)[0])
    reader = ValueDecoder(lambda number: torch.zeros(()), set())
    for each in kept.each:
        policy = reader.decode_value(each["said"]["policy"]) | {"made": [(4, kept.made[0])]}
        each["said"]["policy"] = encode_value(policy, lambda x: 0, "policy")
    said = {k: v for k, v in kept.said.items() if k != "made"}
    (kept.path / MANIFEST).write_bytes(seal_manifest(said))
    rest = lived(EXPERIMENTS["DDP"], tmp_path / "b", kept.path)
    assert [[(c.at_step, c.path, c.value) for c in s.training.policy_runner.made] for s in rest] == [
        [(4, "lr", 0.004)]
    ] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_resumed_run_measures_divergence_from_the_first_loss(ranks: int, tmp_path: Path) -> None:
    values = [2.0] * 10
    task = toy(data=lambda rank, ranks, seed: [(*batch(rank, step, seed), v) for step, v in enumerate(values)],
               loss=lambda model, triple: mse(model, triple[:2]) * 0 + triple[2])  # fmt: skip
    lived(experiment(2, 10, task=task, save_every=10), tmp_path / "a")
    begun = plan_resume(Checkpoint.open(tmp_path / "a"), experiment(ranks, 40, task=task, diverged=10.0, on_nan="stop"))
    for late, told in ((1.0, 0), (50.0, ranks)):
        values[:] = [1e-3] * 22 + [late] * 12 * ranks
        rest = lived(
            begun.experiment, tmp_path / f"{late}", begun.prepare_checkpoint(tmp_path / f"begun {late}"), begun.changes
        )
        assert len(said(rest, "diverged")) == told


def kept_settings(kept: Checkpoint) -> Experiment:
    """Returns the settings of the checkpoint. The toy task is in no record."""
    return replace(Experiment.read({k: v for k, v in kept.settings.items() if k != "task"}), task=toy()).checked()


OTHERS: dict[str, tuple[Experiment, dict[str, Any]]] = {
    "fewer, shards to shards": (EXPERIMENTS["ZeRO3"], {"ranks": 2}),
    "more, out of a round": (EXPERIMENTS["LocalSGD in a round"], {"ranks": 4}),
    "more, with what is owed": (EXPERIMENTS["TopK"], {"ranks": 4}),
    "stages to whole": (piped(4, 20, partition=Pipeline()), {"ranks": 2, "partition": Whole()}),
    "whole to stages": (piped(2, 20), {"ranks": 4, "partition": Pipeline()}),
    "slices to stages": (piped(4, 20, partition=Tensor()), {"partition": Pipeline()}),
    "another strategy": (EXPERIMENTS["ZeRO3"], {"strategy": LocalSGD(every=2), "compressor": TopK.usual()}),
    "an outer momentum": (experiment(3, 20, strategy=DiLoCo(every=5)), {"ranks": 2}),
    "torch's own": (EXPERIMENTS["TorchFSDP"], {"ranks": 3, "strategy": DDP()}),
}  # fmt: skip


@pytest.mark.parametrize("label", OTHERS)
def test_a_run_resumes_with_other_ranks_strategies_and_partitions(label: str, tmp_path: Path) -> None:
    e, rest = OTHERS[label]
    before = lived(replace(e, steps=10, save_every=10, eval_every=10), tmp_path / "a")
    kept = Checkpoint.open(tmp_path / "a")
    begun = plan_resume(kept, replace(e, steps=20, eval_every=10, **rest).checked())
    after = lived(begun.experiment, tmp_path / "b", begun.prepare_checkpoint(tmp_path / "begun"), begun.changes)
    assert [s.rank.step for s in after] == [20] * len(after) and len(after) == rest.get("ranks", e.ranks)
    assert after[0].experiment == replace(e, steps=20, eval_every=10, **rest).checked()
    ends, begins = ([v for _, kind, _, v in ss[0].record.samples if kind == "held_out"] for ss in (before, after))
    assert begins[0] == pytest.approx(ends[-1], rel=1e-5) and begins[-1] < 2 * begins[0]
    assert not said(after, "refused") and not said(after, "not saved")


def test_fewer_ranks_inherit_all_residuals(tmp_path: Path) -> None:
    e = replace(experiment(3, 10, compressor=TopK.usual()), save_every=10)
    before = lived(e, tmp_path / "a")
    owed = [s.rank.memory.buffers["residual"] for s in before]
    whole = gather_checkpoint(Checkpoint.open(tmp_path / "a"), e, 2, tmp_path / "begun")
    after = live(replace(e, ranks=2, save_every=0), resume=str(whole.path))  # its last step is made, so it only begins
    ended(after)
    mine = [s.rank.memory.buffers["residual"] for s in after]
    for of in owed[0]:
        torch.testing.assert_close(mine[0][of].view(-1), (owed[0][of] + owed[1][of]).view(-1))
        torch.testing.assert_close(mine[1][of].view(-1), owed[2][of].view(-1))


def test_the_task_and_the_steps_must_fit(tmp_path: Path) -> None:
    lived(experiment(2, 10, save_every=10), tmp_path / "a")
    kept = Checkpoint.open(tmp_path / "a")
    with pytest.raises(KnobError, match="steps=10: the checkpoint was made before step 10; take more steps, or 0"):
        plan_resume(kept, experiment(2, 10))
    with pytest.raises(KnobError, match=r"does not fit this run: its model has .*; resume with the settings and"):
        sessions = live(piped(2, 20), run_dir=None, resume=str(kept.path))
        ended(sessions)
        raise KnobError(str(sessions[0].error and sessions[0].error["text"]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    sessions = lived(experiment(3, 10, strategy=ZeRO3(), save_every=10), tmp_path / "a")
    model = net()
    dcp.load(
        {"model": model.state_dict()}, checkpoint_id=str(list_checkpoints(tmp_path / "a" / FOLDER)[-1]), no_dist=True
    )
    held(sessions)
    mine = torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])
    assert torch.equal(mine, weights(sessions[0]))


def test_state_that_ranks_share_is_written_once(tmp_path: Path) -> None:
    sessions = lived(experiment(3, 10, save_every=10), tmp_path / "a")
    nbytes = sum(file.stat().st_size for file in list_checkpoints(tmp_path / "a" / FOLDER)[-1].glob("*.distcp"))
    model = sessions[0].layout.byte_count
    # weights and momenta; each rank's own data are states of random numbers
    assert 2 * model < nbytes < 3.5 * model + 80_000
    assert len({s.rank.id for s in sessions}) == 3


# when it fails


def test_a_failing_disk_ends_a_checkpoint_but_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = Draft.file

    def full(self: Draft, called: str) -> Any:
        if called == "__1_0.distcp" and name(4) in str(self.path):
            raise OSError(28, "No space left on device")
        return true(self, called)

    monkeypatch.setattr(Draft, "file", full)
    e = experiment(2, 12, strategy=LocalSGD(every=5), save_every=4, pace=30.0)  # rank 1 has a file in any case
    sessions = lived(e, tmp_path / "a")
    (why,) = said(sessions, "not saved")
    assert why["text"] == "no checkpoint was made before step 4: rank 1: No space left on device"
    assert [p.name for p in sorted((tmp_path / "a" / FOLDER).iterdir())] == [name(8), name(12)]


def test_a_checkpoint_exists_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint is torn, at whatever moment a run ends. The next one removes torn drafts."""
    seen: list[list[Path]] = []
    true = os.rename

    def look(one: Any, other: Any) -> None:
        seen.append(list_checkpoints(Path(other).parent))
        there = sorted(p.name for p in Path(one).iterdir())
        assert there == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
        true(one, other)

    folder = tmp_path / "a" / FOLDER
    (folder / ".step-00000002.part").mkdir(parents=True)
    (folder / ".step-00000002.part" / "__0_0.distcp").write_bytes(b"torn")
    (folder / "step-00000001").mkdir()
    monkeypatch.setattr(os, "rename", look)
    sessions = live(experiment(2, 12, strategy=LocalSGD(every=5), save_every=12), run_dir=tmp_path / "a")
    ended(sessions)
    assert seen == [[]] and [p.name for p in list_checkpoints(folder)] == [name(12)]
    assert not list(folder.glob(".step-*"))


def test_a_checkpoint_due_while_another_is_written_is_skipped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes, true = threading.Event(), CheckpointWriter._write_checkpoint

    def slow(self: CheckpointWriter, *rest: Any) -> None:
        goes.wait(60)
        true(self, *rest)

    monkeypatch.setattr(CheckpointWriter, "_write_checkpoint", slow)
    monkeypatch.setattr(CheckpointWriter, "close", lambda self, patience=None: (goes.set(), self._thread.join()))
    sessions = lived(experiment(2, 9, save_every=3), tmp_path / "a")
    (left,) = said(sessions, "not saved")
    why = "the previous one is still being written; raise save_every"
    assert left["text"] == f"no checkpoint was made before step 6: {why}"
    assert [one["step"] for one in said(sessions, "saved")] == [3, 9]  # ranks wait for the last one


def test_ranks_without_a_common_step_make_the_same_checkpoints(tmp_path: Path) -> None:
    """Rank 0 has not reached the end when another rank has: both plan the same next checkpoint, or none."""
    slow = (Slow(rank=3, factor=1.3), Slow(rank=0, factor=1.1))
    e = Experiment(task=ClickThrough(), strategy=ShadowSync(), ranks=4, steps=24, eval_every=0, save_every=5, pace=5.0)
    sessions = live(e.set("fabric.faults", slow).checked(), run_dir=tmp_path)
    ended(sessions)
    assert {s.phase for s in sessions} == {"done"} and said(sessions, "saved")


def test_a_run_that_ends_while_writing_leaves_nothing_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes, true = threading.Event(), threading.Event(), filing.write_pieces

    def slow(*rest: Any) -> Any:
        begun.set()
        goes.wait(60)
        return true(*rest)

    monkeypatch.setattr(filing, "write_pieces", slow)
    sessions = live(experiment(2, 0, save_every=3, pace=5.0), run_dir=tmp_path)
    assert begun.wait(60)
    for s in sessions:
        s.abort(asked=True)
    goes.set()
    ended(sessions)
    for s in sessions:
        s.training.checkpointer.end()
    assert list_checkpoints(tmp_path / FOLDER) == [] and not said(sessions, "saved")


def test_paused_ranks_make_a_checkpoint(tmp_path: Path) -> None:
    sessions = live(experiment(2, 0, pace=5.0), run_dir=tmp_path)
    for what in ("pause", "checkpoint"):
        sessions[0].request({"kind": what, "id": what})
    while not said(sessions, "saved"):
        assert not sessions[0].join(0.05)
    assert sessions[0].phase == "paused"
    sessions[0].request({"kind": "stop", "id": "stop"})
    ended(sessions)
    (kept,) = list_checkpoints(tmp_path / FOLDER)
    assert Checkpoint.open(kept).step == sessions[0].rank.step == sessions[1].rank.step


def test_a_requested_checkpoint_is_kept(tmp_path: Path) -> None:
    sessions = live(experiment(2, 0, pace=5.0, saves=1), run_dir=tmp_path)
    for _ in range(2):
        sessions[0].request({"kind": "checkpoint", "id": "one"})
        count = len(said(sessions, "saved"))
        while len(said(sessions, "saved")) == count:
            assert not sessions[0].join(0.05)
    sessions[0].request({"kind": "change", **Change(0, "save_every", 2).plain()})
    while len(said(sessions, "saved")) < 6:
        assert not sessions[0].join(0.05)
    sessions[0].request({"kind": "stop", "id": "stop"})
    ended(sessions)
    asked = [Checkpoint.open(path).asked for path in list_checkpoints(tmp_path / FOLDER)]
    assert asked[:2] == [True, True] and not any(asked[2:]) and len(asked) == 3


def test_requesting_an_existing_checkpoint_keeps_it(tmp_path: Path) -> None:
    sessions = live(experiment(2, 0, save_every=3, saves=1), run_dir=tmp_path)
    sessions[0].request({"kind": "pause", "id": "pause"})
    assert until(lambda: sessions[0].phase == "paused")
    for n in range(3 - sessions[0].rank.step % 3):
        at = sessions[0].rank.step
        sessions[0].request({"kind": "step", "id": f"step {n}", "n": 1})
        assert until(lambda at=at: sessions[0].phase == "paused" and sessions[0].rank.step == at + 1)
    assert until(lambda: any(one["step"] == sessions[0].rank.step for one in said(sessions, "saved")))
    here, count = sessions[0].rank.step, len(said(sessions, "saved"))
    sessions[0].request({"kind": "checkpoint", "id": "mine"})
    assert until(lambda: len(said(sessions, "saved")) > count)
    sessions[0].request({"kind": "resume", "id": "resume"})
    assert until(lambda: len(said(sessions, "saved")) > count + 3)
    sessions[0].request({"kind": "stop", "id": "stop"})
    ended(sessions)
    assert [c.step for c in map(Checkpoint.open, list_checkpoints(tmp_path / FOLDER)) if c.asked] == [here]


def test_pruning_keeps_the_newest_the_best_and_the_requested(tmp_path: Path) -> None:
    lived(experiment(1, 10, save_every=10), tmp_path / "a")
    of = list_checkpoints(tmp_path / "a" / FOLDER)[0]
    about = Checkpoint.open(of).said
    for step, held_out, asked in ((1, 0.9, False), (2, 0.1, False), (3, None, True), (4, 0.5, False), (5, 0.4, False)):
        shutil.copytree(of, tmp_path / "b" / name(step))
        changed = {**about, "step": step, "held_out": held_out, "asked": asked}
        (tmp_path / "b" / name(step) / "manifest.json").write_bytes(seal_manifest(changed))
    (tmp_path / "b" / name(9)).mkdir()
    (tmp_path / "b" / name(9) / "manifest.json").write_text("{}")  # prune must not remove it
    assert [p.name for p in prune(tmp_path / "b", 1)] == [name(1), name(4)]
    assert [p.name for p in list_checkpoints(tmp_path / "b")] == [name(2), name(3), name(5), name(9)]
