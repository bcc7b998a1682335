"""Tests that damaged checkpoints are refused by file name, and that deletions follow no link."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests import damage
from tests.damaged_checkpoint import AT, DamagedCheckpoint
from tests.kept import simulated
from tests.ranks import toy
from workbench import Checkpoint
from workbench.record import drafts
from workbench.record.checkpoints import FOLDER, MANIFEST, REPLACED, list_checkpoints, name, prune, step_of
from workbench.record.drafts import Draft
from workbench.record.folders import make_private_folder
from workbench.record.store import RunError
from workbench.sim.run.resuming import model_of
from workbench.strategies import DDP, Gossip, LocalSGD, Strategy, ZeRO3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes checkpoints before steps 2 and 4."""
    folder = tmp_path_factory.mktemp("made")
    simulated(2, 4, folder, 2, saves=9)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copied")


def test_a_changed_digit_of_the_manifest_is_refused_and_the_older_checkpoint_named(copied: Path) -> None:
    newest = copied / name(4)
    text = (newest / MANIFEST).read_text()
    at = text.index('.distcp", ') + len('.distcp", ')
    (newest / MANIFEST).write_text(text[:at] + ("3" if text[at] != "3" else "7") + text[at + 1 :])
    said = (f"{newest}: its manifest.json was changed after it was written: its SHA-256 differs; "
            f"resume from the previous checkpoint, {copied / name(2)}")  # fmt: skip
    for path in (newest, copied):
        with pytest.raises(RunError) as error:
            Checkpoint.open(path)
        assert str(error.value) == said
    (copied / name(2) / MANIFEST).write_text("{}")
    with pytest.raises(RunError, match="differs; resume from another checkpoint"):
        Checkpoint.open(newest)


def test_a_damaged_file_is_refused_by_name_before_its_values_are_used(copied: Path) -> None:
    file = copied / name(4) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(RunError, match=rf"__0_0.distcp was changed.*previous checkpoint, .*{name(2)}"):
        Checkpoint.open(copied).model(toy())


@pytest.mark.parametrize("strategy", [DDP(), ZeRO3(), LocalSGD(every=3), Gossip()], ids=lambda s: type(s).__name__)
def test_a_damaged_file_is_never_reported_as_a_checkpoint_that_does_not_fit(strategy: Strategy, tmp_path: Path) -> None:
    simulated(2, 4, tmp_path / "made", 2, saves=9, strategy=strategy)
    kept = Checkpoint.open(tmp_path / "made")
    (kept.path / "__1_0.distcp").unlink()
    for read in (lambda: kept.model(toy()), lambda: simulated(2, 6, tmp_path, 0, resume=kept, strategy=strategy)):
        with pytest.raises(RunError, match=rf"__1_0.distcp cannot be read.*previous checkpoint, .*{name(2)}") as error:
            read()
        assert "fit" not in str(error.value).split(":", 1)[1]


def test_a_manifest_without_its_checksum_is_refused_unless_an_older_version_wrote_it(copied: Path) -> None:
    newest = copied / name(4)
    before = Checkpoint.open(newest).model(toy()).state_dict()
    said = json.loads((newest / MANIFEST).read_text())
    del said["sha256"]
    (newest / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(RunError, match="it has no SHA-256 of itself"):
        Checkpoint.open(newest)
    said["schema"] = 1
    for each in said["each"]:
        each["items"] = [item[:3] for item in each["items"]]
    del said["reads"]
    (newest / MANIFEST).write_text(json.dumps(said))
    for key, x in Checkpoint.open(newest).model(toy()).state_dict().items():
        assert torch.equal(x, before[key])


def test_the_public_checkpoint_gives_the_model(copied: Path) -> None:
    one = Checkpoint.open(copied)
    assert (one.step, one.ranks, one.path) == (4, 2, copied / name(4))
    mine = toy().build().model()
    assert one.model(toy(), into=mine) is mine
    for key, x in model_of(one, toy()).state_dict().items():
        assert torch.equal(mine.state_dict()[key], x)


@pytest.mark.parametrize("linked", ["a checkpoint", "the folder"])
def test_pruning_deletes_nothing_behind_a_symbolic_link(linked: str, made: Path, copied: Path, tmp_path: Path) -> None:
    """`copied` belongs to another run; ours has one checkpoint, or none."""
    mine = tmp_path / "mine" / FOLDER
    mine.parent.mkdir()
    if linked == "the folder":
        mine.symlink_to(copied, target_is_directory=True)
    else:
        shutil.copytree(made, mine)
        shutil.rmtree(mine / name(2))
        (mine / name(1)).symlink_to(copied / name(2), target_is_directory=True)
    assert prune(mine, 1) == []
    assert [path.name for path in list_checkpoints(copied)] == [name(2), name(4)]
    assert linked == "the folder" or (mine / name(1)).is_symlink()


def test_a_draft_replaces_a_link_and_keeps_its_target(copied: Path, tmp_path: Path) -> None:
    mine = tmp_path / FOLDER
    mine.mkdir()
    (mine / name(4)).symlink_to(copied / name(4), target_is_directory=True)
    (mine / f".{name(3)}.part").symlink_to(copied / name(2), target_is_directory=True)
    said = dict(Checkpoint.open(copied / name(4)).said)
    draft = Draft(mine, 4)
    draft.begin()
    draft.commit(said)
    assert not (mine / name(4)).is_symlink() and (mine / name(4) / MANIFEST).is_file()
    assert [path.name for path in list_checkpoints(copied)] == [name(2), name(4)]
    assert sorted(path.name for path in mine.iterdir()) == [name(4)]


@pytest.mark.parametrize("end", ["crash", "error"])
def test_a_draft_that_does_not_come_leaves_the_checkpoint_of_the_same_step(
    copied: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    said, rename = dict(Checkpoint.open(copied / name(4)).said), os.rename
    draft = Draft(copied, 4)
    draft.begin()

    def fail(source: Path, to: Path) -> None:
        if source == draft.path:
            raise OSError("the machine ends here")
        rename(source, to)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="ends here"):
        draft.commit(said)
    monkeypatch.undo()
    Draft(copied, 6).begin() if end == "crash" else draft.give_up()
    assert Checkpoint.open(copied / name(4)).said == said
    assert [path.name for path in list_checkpoints(copied)] == [name(2), name(4)]


@pytest.mark.parametrize("asked", ["a run", "a folder", "a checkpoint"])
def test_the_first_resume_after_a_crash_between_the_two_renames_finds_the_newest_checkpoint(
    copied: Path, tmp_path: Path, asked: str
) -> None:
    (tmp_path / "run").mkdir()
    folder = copied.rename(tmp_path / "run" / FOLDER)
    said = dict(Checkpoint.open(folder / name(4)).said)
    shutil.copytree(folder / name(4), folder / f".{name(4)}.part")
    (folder / name(4)).rename(folder / f".{name(4)}{REPLACED}")
    opened = {"a run": folder.parent, "a folder": folder, "a checkpoint": folder / name(4)}[asked]
    assert Checkpoint.open(opened).said == said
    assert [step_of(path) for path in list_checkpoints(folder)] == [2, 4]


def test_a_list_of_checkpoints_has_one_that_a_killed_writer_hid(copied: Path) -> None:
    (copied / name(4)).rename(copied / f".{name(4)}{REPLACED}")
    assert [step_of(path) for path in list_checkpoints(copied)] == [2, 4]


def test_a_folder_that_cannot_be_changed_shows_its_older_checkpoint(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / name(4)).rename(copied / f".{name(4)}{REPLACED}")

    def refuse(source: Path, to: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    assert Checkpoint.open(copied).step == 2


def test_a_reader_that_restores_a_checkpoint_stops_no_live_writer(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, rename = dict(Checkpoint.open(copied / name(4)).said), os.rename
    draft, seen = Draft(copied, 4), list[list[int]]()
    draft.begin()

    def rename_with_reader(source: Path, to: Path) -> None:
        rename(source, to)
        if to.name.endswith(REPLACED) and not seen:  # between the two renames
            seen.append([step_of(path) for path in list_checkpoints(copied)])

    monkeypatch.setattr(os, "rename", rename_with_reader)
    assert draft.commit({**said, "made": [{"new": 1}]}) == copied / name(4)
    assert seen == [[2, 4]] and Checkpoint.open(copied).made == [{"new": 1}]
    assert sorted(path.name for path in copied.iterdir()) == [name(2), name(4)]


def test_a_replaced_checkpoint_that_cannot_be_removed_stops_no_later_one(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader on NFS may hold its files open."""
    said = dict(Checkpoint.open(copied / name(4)).said)
    remove = drafts.remove_folder

    def fail(folder: Path) -> None:
        if folder.name.endswith(REPLACED):
            raise OSError("Directory not empty")
        remove(folder)

    monkeypatch.setattr(drafts, "remove_folder", fail)
    draft = Draft(copied, 4)
    draft.begin()
    assert draft.commit(said) == copied / name(4)
    draft.give_up()
    Draft(copied, 6).begin()
    assert Checkpoint.open(copied / name(4)).said == said


def test_folders_that_are_made_again_are_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for _ in range(2):
            Draft(tmp_path / "run" / FOLDER, 1).begin()
            modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "run", *(tmp_path / "run").rglob("*"))]
            assert modes == [0o700] * 3
            shutil.rmtree(tmp_path / "run")
        make_private_folder(tmp_path / "a" / "b")
        make_private_folder(tmp_path / "a" / "b")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_random_damage_loads_no_wrong_value_and_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Plays a part of the seeds of `make damage`; docs/project/reliability.md has the results of the rest."""
    subject = DamagedCheckpoint()
    subject.make(tmp_path / "good")
    assert (tmp_path / "good" / DamagedCheckpoint.manifest).is_file() and AT == 4
    seen = {damage.play(subject, tmp_path / "good", tmp_path / "case", seed, DamagedCheckpoint.manifest)["outcome"]
            for seed in range(10)}  # fmt: skip
    assert seen == {"refused"}, "every digit of a manifest counts"
    seeds = range(damage.DIGITS, damage.DIGITS + 20)
    others = [damage.play(subject, tmp_path / "good", tmp_path / "case", seed) for seed in seeds]
    assert not [one for one in others if one["outcome"] != "refused"]
