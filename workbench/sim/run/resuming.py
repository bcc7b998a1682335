"""Resumes a run from a checkpoint: determines the first settings and the changes before the first step.

Settings that differ become changes. For another number of ranks, this process first gathers the checkpoint's state: it
simulates the checkpoint's ranks with real tensors and without a step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from workbench.experiment import Experiment
from workbench.host.checkpoint.checkpointer import GatherEvent
from workbench.host.checkpoint.model_export import MODEL_KIND, read_model_state
from workbench.host.checkpoint.model_pieces import read_whole_model
from workbench.host.checkpoint.rank_image import RankImage
from workbench.host.checkpoint.restore import open_image
from workbench.host.checkpoint.whole_image import gather_model, make_whole_image
from workbench.partitions import Whole
from workbench.policies import ByHand
from workbench.record.checkpoints import Checkpoint, CheckpointFiles
from workbench.record.store import RunError
from workbench.settings import Change, KnobError, knobs, short, to_plain
from workbench.sim.rank.checkpoints import write_checkpoint
from workbench.sim.run.simulate import restore_ranks
from workbench.strategies import DDP
from workbench.tasks._written import Unwritable
from workbench.tasks._written import written as written_model

JOINT_KNOBS = ("strategy", "partition")


class ResumePlan(NamedTuple):
    """How a run resumes.

    experiment: the first settings of all ranks; changes: at the checkpoint's step and later
    checkpoint: the source; made: its settings
    """

    experiment: Experiment
    changes: tuple[Change, ...]
    checkpoint: Checkpoint
    made: Experiment

    @property
    def parent(self) -> dict[str, Any]:
        """The run's origin, for its record."""
        of = self.checkpoint.path.parent.parent
        return {"checkpoint": str(self.checkpoint.path), "step": self.checkpoint.step, "run": str(of)}

    def prepare_checkpoint(self, folder: Path) -> Path:
        """Returns the checkpoint for the ranks to read. For another number of ranks, makes it in `folder`."""
        if self.experiment.ranks == self.checkpoint.ranks:
            return self.checkpoint.path
        return gather_checkpoint(self.checkpoint, self.made, self.experiment.ranks, folder).path


def settings_of(checkpoint: Checkpoint, task: Any = None) -> Experiment:
    """Returns the checkpoint's settings, with `task` if settings cannot describe it. Raises KnobError."""
    settings = dict(checkpoint.settings)
    if task is not None:
        settings.pop("task", None)
        return replace(Experiment.read(settings), task=task).checked()
    return Experiment.read(settings).checked()


def _plain_task(checkpoint: Checkpoint) -> Any:
    """Returns the task as plain data; None if only the notebook can make it."""
    with suppress(KnobError):
        return to_plain(settings_of(checkpoint).task)
    return None


def plan_resume(checkpoint: Checkpoint, wanted: Experiment | None, changes: Sequence[Change] | None = None,
            most: int = 0) -> ResumePlan:  # fmt: skip
    """Returns how a run resumes under `wanted`; None: under its own settings. Raises KnobError.

    changes: planned changes, at steps of the whole run; None: the checkpoint's remaining changes
    most:    available ranks, if `wanted` is None
    """
    if checkpoint.kind == MODEL_KIND:
        raise KnobError(f"resume={checkpoint.path}: holds only the model of a custom loop, which cannot "
                        f"continue in the middle; load a file of run.save_model(path) in the loop")  # fmt: skip
    if checkpoint.kind == "whole":
        raise KnobError(f"resume={checkpoint.path}: was gathered for one run; resume from the checkpoint "
                        f"that it was gathered from")  # fmt: skip
    saved, step = settings_of(checkpoint, wanted and wanted.task), checkpoint.step
    wanted = replace(saved, ranks=min(saved.ranks, most or saved.ranks)) if wanted is None else wanted
    wanted = wanted.checked()
    task, known = to_plain(wanted.task), _plain_task(checkpoint)
    if known is not None and known != task:
        raise KnobError(f"task={short(task)}: the checkpoint has the task {short(known)}; resume with it")
    if 0 < wanted.steps <= step:
        raise KnobError(f"steps={wanted.steps}: the checkpoint was made before step {step}; take more steps, or 0")
    to_come = tuple(changes) if changes is not None else _read_planned(checkpoint)
    start = saved if wanted.ranks == checkpoint.ranks else _first_settings(saved, wanted)
    fixed = {k.name: getattr(wanted, k.name) for k in knobs(Experiment) if not k.live}
    start = replace(start, **fixed).checked()
    made = tuple(Change(step, settings) for settings in _list_differing_knobs(start, wanted))
    return ResumePlan(start, (*made, *(c for c in to_come if c.at_step >= step)), checkpoint, saved)


def _read_planned(checkpoint: Checkpoint) -> tuple[Change, ...]:
    """Returns the remaining planned changes. Raises KnobError."""
    try:
        return tuple(Change.read(plain, int(plain["at_step"])) for plain in checkpoint.planned)
    except (KeyError, TypeError, ValueError):
        raise KnobError(
            f"resume={checkpoint.path}: its planned changes are invalid; give changes=[] or other changes"
        ) from None


def _list_differing_knobs(start: Experiment, wanted: Experiment) -> Iterator[dict[str, Any]]:
    """Yields knobs to set, in a valid order. Raises KnobError if no order is valid.

    Strategy and partition change together, because the state between their changes may not fit into memory.
    """
    left = {k.name: getattr(wanted, k.name) for k in knobs(Experiment) if k.live}
    now = start
    while left := {name: value for name, value in left.items() if getattr(now, name) != value}:
        for names in [*([JOINT_KNOBS] if set(JOINT_KNOBS) <= left.keys() else ()), *((name,) for name in left)]:
            settings = {name: to_plain(left[name]) for name in names}
            try:
                now = now.set(settings)
            except KnobError as error:
                reason = error
                continue
            yield settings
            break
        else:
            raise KnobError(f"a change from the settings of the checkpoint is refused: {reason}")


def _first_settings(saved: Experiment, wanted: Experiment) -> Experiment:
    """Returns first settings for another number of ranks: close to the old ones, with the whole model per rank."""
    reason: KnobError | None = None
    for compressor in (saved.compressor, wanted.compressor):
        try:
            return replace(wanted, optimizer=saved.optimizer, partition=Whole(), compressor=compressor).checked()
        except KnobError as error:
            reason = error
    raise KnobError(f"ranks={wanted.ranks}: cannot continue a checkpoint of {saved.ranks} ranks: {reason}")


def gather_checkpoint(checkpoint: Checkpoint, saved: Experiment, size: int, folder: Path) -> Checkpoint:
    """Gathers the checkpoint's state into one checkpoint in `folder` for `size` ranks."""
    found: dict[int, Any] = {}
    images: list[RankImage] = []

    async def hand_in(run: Any) -> None:
        found[run.rank.id] = await gather_model(run)
        if len(found) == saved.ranks:
            momentum, rules, _ = found[0]
            shares = [found[rank][2] for rank in range(saved.ranks)]
            used = max(session.reads.used for session in run.world.sessions)
            images.append(make_whole_image(run.world.sessions[0], momentum, rules, shares, size, used))

    _restore_ranks(checkpoint, saved, hand_in)
    about = {**{k: v for k, v in checkpoint.said.items() if k in ("experiment", "held_out")},
             "kind": "whole", "step": images[0].step, "ranks": size, "planned": [], "asked": True}  # fmt: skip
    return Checkpoint.open(write_checkpoint(folder, images, about))


def model_of(checkpoint: Checkpoint, task: Any = None, into: nn.Module | None = None) -> nn.Module:
    """Returns the trained model. Raises KnobError or RunError.

    task: a user's own Task, which settings cannot describe; into: a model to fill and return
    """
    if checkpoint.kind == MODEL_KIND and into is None:
        raise KnobError("into=None: a custom loop built this model, which settings cannot do; give a model of "
                        "the same shape, into=model, or use run.save_model(path)")  # fmt: skip
    if into is not None:
        return _load_state(into, saved_state(checkpoint, task))
    saved = settings_of(checkpoint, task)
    made = saved.task.build().model()
    if not saved.strategy.periodic and _fill_from_pieces(made, checkpoint):
        return made

    async def hand_in(run: Any) -> None:
        await gather_model(run)
        if run.rank.id == 0:
            mine = dict(run.model.named_parameters()) | dict(run.model.named_buffers())
            with torch.no_grad():
                for name, x in [*made.named_parameters(), *made.named_buffers()]:
                    x.copy_(mine[name])

    _restore_ranks(checkpoint, saved, hand_in)
    return made


def _fill_from_pieces(made: nn.Module, checkpoint: Checkpoint) -> bool:
    """Returns False if the pieces do not fit `made`. Raises RunError for damage."""
    files = CheckpointFiles(checkpoint)
    try:
        state = read_whole_model(checkpoint, files)
    finally:
        files.close()
    here = dict(made.named_parameters()) | dict(made.named_buffers())
    if state is None or any(name not in state or state[name].shape != x.shape or state[name].dtype != x.dtype
                            for name, x in here.items()):  # fmt: skip
        return False
    with torch.no_grad():
        for name, x in here.items():
            x.copy_(state[name])
    return True


def saved_state(checkpoint: Checkpoint, task: Any = None) -> dict[str, Any]:
    """Returns the trained model's state dict. Raises the errors of `model_of`."""
    if checkpoint.kind != MODEL_KIND:
        return dict(model_of(checkpoint, task).state_dict())
    return read_model_state(open_image(checkpoint, CheckpointFiles(checkpoint), 0, alone=True))


def _load_state(model: nn.Module, state: dict[str, Any]) -> nn.Module:
    """Raises KnobError if the state dict does not fit."""
    if not isinstance(model, nn.Module):
        raise KnobError(f"into={short(model)}: must be a torch Module with the shape of the trained model")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        why = str(error).splitlines()[-1].strip()
        raise KnobError(f"into={type(model).__name__}: is another model: {why}") from None
    return model


def _restore_ranks(checkpoint: Checkpoint, saved: Experiment, hand_in: Callable[[Any], Awaitable[None]]) -> None:
    """Each of the checkpoint's ranks calls `hand_in`."""
    strategy = DDP() if saved.strategy.opaque else saved.strategy  # DDP leaves the same state
    e = replace(
        saved, strategy=strategy, steps=checkpoint.step or 1, policy=ByHand(), eval_every=0, memory_mb=0.0, pace=1.0,
        measure_every=0, save_every=0, fabric=replace(saved.fabric, faults=()),
    )  # fmt: skip
    restore_ranks(e, checkpoint, GatherEvent(0, gather=hand_in))


def write_state(path: Path | str, made: Callable[[], dict[str, Any]]) -> Path:
    """Raises KnobError, or RunError if writing fails."""
    try:
        return written_model(path, made)
    except Unwritable as error:
        raise RunError(str(error)) from None
