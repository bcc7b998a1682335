"""Writes checkpoints on a thread and a wire of their own, so that no step waits for the disk.

The images are copies, made between two steps. An error such as a full disk ends only this checkpoint; a Mark gives the
reason.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from workbench.engine.collectives.wire import Aborted, Wire
from workbench.engine.compute.clocked_view import ClockedView
from workbench.engine.control.canonical import gather_lists
from workbench.engine.control.peers import Peers
from workbench.host.checkpoint import piece_files as filing
from workbench.host.checkpoint.rank_image import RankImage
from workbench.host.checkpoint.restore import RestoredState, open_image
from workbench.record import checkpoints
from workbench.record.checkpoints import Checkpoint, CheckpointFiles
from workbench.record.drafts import Draft
from workbench.record.store import RunError
from workbench.settings import KnobError
from workbench.settings.describe_error import text_of


class WrittenView(ClockedView, Protocol):
    """A rank that writes checkpoints."""

    @property
    def peers(self) -> Peers: ...


class CheckpointStore:
    """None: no checkpoints"""

    def __init__(self, run_dir: Path | None) -> None:
        self.folder = Path(run_dir) / checkpoints.FOLDER if run_dir is not None else None

    def list_steps(self) -> list[int]:
        found = checkpoints.list_checkpoints(self.folder) if self.folder is not None else []
        return [checkpoints.step_of(path) for path in reversed(found)]

    def open_checkpoint(self, step: int, rank: int) -> tuple[dict[str, Any], RestoredState]:
        try:
            checkpoint = Checkpoint.open((self.folder or Path()) / checkpoints.name(step))
            return checkpoint.settings, open_image(checkpoint, CheckpointFiles(checkpoint), rank, alone=True)
        except RunError as error:
            raise KnobError(str(error)) from None


def open_resumed(resume: str, rank: int) -> RestoredState | None:
    """Returns the image of `rank` in the checkpoint from which a run resumes; None without one.

    Raises RunError if the checkpoint cannot be read.
    """
    if not resume:
        return None
    checkpoint = Checkpoint.open(resume)
    return open_image(checkpoint, CheckpointFiles(checkpoint), rank, alone=True)


class CheckpointWriter:
    """One rank's part in writing checkpoints."""

    def __init__(self, run: WrittenView, folder: Path) -> None:
        self.run, self.folder = run, folder
        self._wire: Wire | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def write_image(self, image: RankImage, about: dict[str, Any]) -> None:
        """All ranks call this at the same boundary, when no rank is busy."""
        if self._wire is None and self.run.rank.size > 1:
            self._wire = self.run.peers.open_wire("checkpoints")
        name = f"rank {self.run.rank.id} checkpoint"
        self._thread = threading.Thread(target=self._write_checkpoint, args=(image, about), name=name, daemon=True)
        self._thread.start()

    def close(self, patience: float | None = None) -> None:
        """Waits for the present checkpoint or its failure. patience: seconds"""
        if self._thread is not None:
            self._thread.join(patience)

    # -- on its own thread --

    def _write_checkpoint(self, image: RankImage, about: dict[str, Any]) -> None:
        run, began, draft = self.run, self.run.clock.now(), Draft(self.folder, about["step"])
        try:
            said, manifest = self._write_pieces(image, about, draft)
            if run.rank.id == 0 and said:
                draft.give_up()
                run.mark("not saved", {"text": f"no checkpoint was made before step {about['step']}: {said}"})
            elif run.rank.id == 0:
                self._mark_saved(about, manifest, run.clock.now() - began)
        except (Aborted, RuntimeError, ConnectionError):  # the step reports this
            if run.rank.id == 0:
                draft.give_up()

    def _mark_saved(self, about: dict[str, Any], manifest: dict[str, Any], seconds: float) -> None:
        """On rank 0: writes the Mark of the new checkpoint, and of the old ones that it removes."""
        path, keep = self.folder / checkpoints.name(about["step"]), self.run.experiment.saves
        nbytes = sum(file["nbytes"] for file in manifest["files"].values())
        text = f"the checkpoint before step {about['step']} is whole: {nbytes / 1e6:.1f} MB, written in {seconds:.1f} s"
        said = {"step": about["step"], "path": str(path), "nbytes": nbytes, "seconds": seconds, "asked": about["asked"],
                "held_out": about["held_out"]}  # fmt: skip
        try:
            gone = [old.name for old in checkpoints.prune(self.folder, keep)]
        except OSError as error:
            gone, text = [], f"{text}; older ones could not be removed ({error.strerror})"
        self.run.mark("saved", said | {"removed": gone, "text": text})

    def _write_pieces(self, image: RankImage, about: dict[str, Any], draft: Draft) -> tuple[str, dict[str, Any]]:
        """Returns the reason of a failure, or ""; on rank 0 also the manifest."""
        me, found, files = self.run.rank.id, list[Any](), list[Any]()

        def look() -> filing.PieceSizes:
            if me == 0:
                draft.begin()
            found.extend(filing.hash_pieces(image))
            return filing.measure_pieces(found)

        tables = self._exchange_reports(look)
        if isinstance(tables, str):
            return tables, {}

        def file() -> Any:
            files.append(draft.file(filing.name_file(me)))
            return files[0]

        def write() -> dict[str, Any]:
            places = filing.write_pieces(found, filing.assign_writers(tables)[me], file)
            return filing.make_report(image, found, places, files[0].close() if files else None)

        reports = self._exchange_reports(write)
        if isinstance(reports, str) or me:
            return (reports, {}) if isinstance(reports, str) else ("", {})
        try:
            manifest = filing.make_manifest(about, reports)
            manifest["files"][checkpoints.METADATA] = _write_metadata(draft, reports)
            draft.commit(manifest)
        except Exception as error:
            return _describe_error(error), {}
        return "", manifest

    def _exchange_reports(self, make: Callable[[], Any]) -> Any:
        """Returns `make`'s results by rank, or a text why it failed on one rank."""
        try:
            said = {"made": make()}
        except Exception as error:  # the other ranks wait for this report
            said = {"failed": _describe_error(error)}
        every = [json.loads(text) for text in self._gather_texts(json.dumps(said))]
        number = self.run.rank.number
        failed = [f"rank {number(place)}: {one['failed']}" for place, one in enumerate(every) if "failed" in one]
        return failed[0] if failed else [one["made"] for one in every]

    def _gather_texts(self, text: str) -> list[str]:
        wire = self._wire
        if wire is None:
            return [text]
        raw = text.encode()
        lengths = [row[0] for row in gather_lists(wire, [len(raw)])]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        out = torch.empty(wire.size, max(lengths), dtype=torch.uint8)
        wire.wait(wire.all_gather(out.view(-1), mine))
        return [bytes(row[:n].numpy()).decode() for row, n in zip(out, lengths, strict=True)]


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {text_of(error)}"


def _write_metadata(draft: Draft, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Writes metadata for torch.distributed.checkpoint's `dcp.load({"model": ...})`: a pickle for other programs."""
    import pickle

    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, Any] = {}
    lies: dict[Any, Any] = {}
    for name, shape, (offsets, sizes), (rank, at, length, _, _, dtype, _) in filing.list_boxes(reports):
        kind = dcp.TensorProperties(dtype=getattr(torch, dtype))
        known = tensors.setdefault(name, dcp.TensorStorageMetadata(kind, torch.Size(shape), []))
        index = dcp.MetadataIndex(name, torch.Size(offsets), len(known.chunks))
        known.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        lies[index] = _StorageInfo(filing.name_file(rank), at, length)
    paths = {name: tuple(name.split(".", 1)) for name in tensors}
    with draft.file(checkpoints.METADATA) as file:
        file.write(pickle.dumps(dcp.Metadata(tensors, planner_data=paths, storage_data=lies, storage_meta=None)))
        return file.close()
