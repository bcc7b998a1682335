"""Checkpoints of a simulation with real tensors. Writing takes no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.host.checkpoint import piece_files as filing
from workbench.host.checkpoint.rank_image import RankImage
from workbench.record import checkpoints
from workbench.record.drafts import Draft


class CheckpointStore:
    """Collects all ranks' images, then writes a checkpoint into `folder`."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._images: dict[int, RankImage] = {}

    def make_writer(self, session: Any) -> _RankWriter:
        return _RankWriter(self, session)

    def take_image(self, session: Any, image: RankImage, about: dict[str, Any]) -> None:
        self._images[session.rank.id] = image
        if len(self._images) == self._size:
            images, self._images = [self._images[rank] for rank in range(self._size)], {}
            about = about | {"held_out": session.world.sessions[0].held_out}
            path = write_checkpoint(self._folder, images, about)
            checkpoints.prune(self._folder, session.experiment.saves)
            said = {"path": str(path), "step": about["step"], "held_out": about["held_out"]}
            session.mark("saved", said | {"text": f"a checkpoint is in {path}"})


class _RankWriter:
    """A CheckpointStore's interface for one rank."""

    is_busy = False

    def __init__(self, kept: CheckpointStore, session: Any) -> None:
        self._kept, self._session = kept, session

    def write_image(self, image: RankImage, about: dict[str, Any]) -> None:
        self._kept.take_image(self._session, image, about)

    def close(self, patience: float | None = None) -> None:
        """No write is under way."""


def write_checkpoint(folder: Path, images: list[RankImage], about: dict[str, Any]) -> Path:
    """One image per rank. Raises OSError."""
    draft = Draft(folder, about["step"])
    draft.begin()
    try:
        found = [filing.hash_pieces(image) for image in images]
        mine = filing.assign_writers([filing.measure_pieces(each) for each in found])
        reports = []
        for rank, (image, each) in enumerate(zip(images, found, strict=True)):
            opened: list[Any] = []

            def file(rank: int = rank, opened: list[Any] = opened) -> Any:
                opened.append(draft.file(filing.name_file(rank)))
                return opened[0]

            places = filing.write_pieces(each, mine[rank], file)
            reports.append(filing.make_report(image, each, places, opened[0].close() if opened else None))
        return draft.commit(filing.make_manifest(about, reports))
    except BaseException:
        draft.give_up()
        raise
