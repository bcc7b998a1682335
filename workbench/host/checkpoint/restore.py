"""Restores a rank from its own image, bit-identical, or from the whole image of another number of ranks.

Data from a disk are not trusted: names, sizes and kinds must match the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.compressors import inside
from workbench.host.checkpoint.checkpoint_view import CheckpointView
from workbench.host.checkpoint.rank_image import list_untrained, locate_parameters
from workbench.host.checkpoint.value_encoding import ValueDecoder
from workbench.host.core.data_positions import NO_INDEX_TEXT, describe_repeats
from workbench.host.core.rank_view import RankView
from workbench.host.memory.batches import Numbers, ReaderPosition
from workbench.host.memory.budget import OutOfMemory
from workbench.host.reconfigure.unfreezing import freeze_parameters, unfreeze_parameters
from workbench.host.sharding.access_trace import AccessTrace
from workbench.settings import Change, KnobError
from workbench.settings.describe_error import text_of
from workbench.tasks import at_rate

if TYPE_CHECKING:
    from workbench.record.checkpoints import Blob, Checkpoint, CheckpointFiles

MISFIT_ERRORS = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
CLEAR_ERRORS = (OutOfMemory, torch.OutOfMemoryError)
MACHINE_ERRORS = ("can't allocate memory", "CUDA error", "NCCL error")  # in torch's RuntimeError
OUTER_MOMENTUM, OWED_RESIDUALS = "outer", "owed"  # residuals by heir


class RestoredState:
    """A rank's image, read back.

    whole:  whether it has the whole model, from another number of ranks
    made:   the earlier changes, as JSON
    reads:  a step's order of reading parameters, as JSON; None if they were whole, or from older versions
    tensor: returns the tensor of a number, flat if it is in several pieces
    damage: `tensor`'s error for a damaged file
    """

    def __init__(self, path: str, kind: str, said: Mapping[str, Any], made: list[dict[str, Any]],
                 tensor: Callable[[int], Tensor], close: Callable[[], None], reads: Any = None,
                 damage: type[Exception] = OSError) -> None:  # fmt: skip
        self.reads, self.damage = reads, damage
        self.path, self.whole, self.entries, self.made = path, kind == "whole", said, made
        self.read_tensor, self.close = tensor, close

    @contextmanager
    def refuse_misfits(self) -> Iterator[None]:
        """Inside, a misfit raises KnobError with the checkpoint's name.

        Errors of memory and of damaged files pass unchanged.
        """
        try:
            yield
        except MISFIT_ERRORS as error:
            if isinstance(error, (*CLEAR_ERRORS, self.damage)) or any(
                words in text_of(error) for words in MACHINE_ERRORS
            ):
                raise
            said = f"it has no {error}" if isinstance(error, KeyError) else str(error).split("\n")[0]
            raise KnobError(f"resume={self.path}: does not fit this run: {said}; resume with the settings and the "
            f"task of the checkpoint, and change them afterwards") from error  # fmt: skip

    @property
    def used(self) -> int:
        """Examples used up."""
        with self.refuse_misfits():
            return int(self.entries.get("used", 0))

    def make_decoder(self, run: RankView) -> ValueDecoder:
        e = run.experiment
        members = (e.strategy, e.optimizer, e.policy, *inside(e.compressor), *inside(run.rank.compressor))
        return ValueDecoder(self.read_tensor, {type(one).__module__ for one in members})

    # -- before shards are cut --

    def begin_restore(self, run: CheckpointView) -> None:
        """Restores the step, and a whole image's state, before the strategy starts.

        Shards follow a step's order of reading parameters. The checkpoint has it, because some losses cannot be traced
        before the first step.
        """
        with self.refuse_misfits():
            run.rank.step = int(self.entries["step"])
            if self.reads is not None and not self.whole:
                run.unsharder.adopt_trace(_decode_trace(self.reads, run.model))
        if self.whole:
            with self.refuse_misfits(), torch.no_grad():
                unfreeze_parameters(run, self.entries["parameters"].keys())
                _restore_values(run, self)
                _restore_optimizer(run, self)
                run.restart_data(self.used)
            if run.rank.id == 0 and not run.learner.indexed:
                run.mark("data", describe_repeats(NO_INDEX_TEXT))

    async def restore_order(self, run: CheckpointView) -> None:
        """Call it before shards are cut."""
        if self.whole:
            return
        with self.refuse_misfits():
            names = [str(name) for name in self.entries["order"]]
            unfreeze_parameters(run, names)
            here = [place.name for place in run.layout.order]
            if sorted(names) != sorted(here):
                raise ValueError(
                    f"its model has parameters {_shorten_names(names)}, and this one {_shorten_names(here)}"
                )
        if any(await run.gather(int(names != here))):
            await run.reorder_parameters(names)

    # -- before the first step --

    async def restore_state(self, run: CheckpointView, anew: bool = True) -> None:
        """Restores all state except random numbers.

        anew: whether the run begins with it; if not, the learning rate and the position in the data stay
        """
        e, reader = run.experiment, self.make_decoder(run)
        await e.strategy.recall(run.rank.replicas, run.state)
        if e.strategy.opaque:
            await run.leave_opaque()
        with self.refuse_misfits(), torch.no_grad():
            if self.whole:
                self._restore_inherited(run, reader)
            else:
                _restore_values(run, self)
                _restore_optimizer(run, self)
                run.state = reader.decode_value(self.entries["state"])
                run.rank.memory.clear()
                reader.load_memory(run.rank.memory, self.entries["memory"])
                if anew:
                    self._restore_position(run, reader)
                else:
                    at_rate(run.optimizer, run.rank.lr)
            freeze_parameters(run, self.entries.get("frozen", ()))
        if e.strategy.opaque:
            run.enter_opaque()
        run.choose_lane()
        await run.gather(0)  # else another rank could read stale memory

    def _restore_position(self, run: CheckpointView, reader: ValueDecoder) -> None:
        vars(run.rate).update(_keep_known(reader.decode_value(self.entries["rate"]), vars(run.rate)))
        run.non_finite_guard.take_first_loss(reader.decode_value(self.entries.get("first")))
        vars(run.error_probe).update(_keep_known(reader.decode_value(self.entries["measuring"]), vars(run.error_probe)))
        if flushing := int(self.entries["flushing"]):
            run.exchange_by(reader.decode_value(self.entries["compressor"]), flushing)
        run.rank.lr = float(self.entries["lr"])
        same = _restore_data(run, reader.decode_value(self.entries["data"]))
        if not same:
            why = f"the data of rank {run.rank.number()} yields different batches on a second reading"
            run.mark("data", describe_repeats(why))

    def _restore_inherited(self, run: CheckpointView, reader: ValueDecoder) -> None:
        rank, more = run.rank, reader.decode_value(self.entries["more"])
        if more[OUTER_MOMENTUM] is not None:
            run.experiment.strategy.takes(rank.replicas, run.state, more[OUTER_MOMENTUM])
        mine = more[OWED_RESIDUALS].get(rank.id, {})
        kept = {c.residual for c in inside(run.experiment.compressor)}
        rank.memory.buffers.update({name: found for name, found in mine.items() if name in kept})
        vars(run.rate).update(_keep_known(reader.decode_value(self.entries["rate"]), vars(run.rate)))
        run.non_finite_guard.take_first_loss(reader.decode_value(self.entries.get("first")))

    def finish_restore(self, run: CheckpointView) -> None:
        """Restores the policy and random numbers, last."""
        if self.whole:
            return
        with self.refuse_misfits():
            reader = self.make_decoder(run)
            kept = reader.decode_value(self.entries["policy"])
            own = [{**plain, "at_step": step} for step, plain in kept.pop("made", ())]  # from older versions
            run.policy_runner.restore_state(
                kept, [Change.read(plain, int(plain["at_step"])) for plain in self.made or own]
            )
            run.restore_slice_rng(reader.decode_value(self.entries["crowd"]))
            run.restore_rng(_decode_rng_states(reader.decode_value(self.entries["draws"])))


def _decode_trace(said: Any, model: nn.Module) -> AccessTrace:
    """Raises ValueError if `model` lacks a parameter."""
    trial = AccessTrace.from_json(said)
    if other := sorted(set(trial.names()) - {name for name, _ in model.named_parameters()}):
        raise ValueError(f"it reads {_shorten_names(other)}, which this model does not have")
    return trial


def _shorten_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _keep_known(said: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name in known}


def _restore_values(run: RankView, saved: RestoredState) -> None:
    for what, here in (("parameters", ((n, x) for n, x, _ in locate_parameters(run))), ("beside", list_untrained(run))):
        numbers = dict(saved.entries[what])
        for name, x in here:
            given = saved.read_tensor(numbers.pop(name))
            if given.numel() != x.numel() or given.dtype != x.dtype:
                raise ValueError(f"{name} has {x.numel()} elements of {x.dtype} here, and {given.numel()} of "
                                 f"{given.dtype} there")  # fmt: skip
            x.copy_(given.view(x.shape))
        if left := [name for name in numbers if name not in saved.entries["parameters"]]:  # older versions wrote both
            raise ValueError(f"it has {_shorten_names(left)}, which this run does not have")


def _restore_optimizer(run: RankView, saved: RestoredState) -> None:
    optimizer, places = run.optimizer, {place.name: place.param for place in run.layout.order}
    reader = saved.make_decoder(run)
    groups = reader.decode_value(saved.entries["groups"])
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"its optimizer has {len(groups)} groups, and this one {len(optimizer.param_groups)}")
    optimizer.state.clear()
    for name, (number, shape, on) in saved.entries["slots"].items():
        slot, _, of = name.partition("/")
        x = saved.read_tensor(number).view(tuple(shape))
        optimizer.state[places[of]][slot] = x.to(places[of].device) if on != "cpu" else x
    for name, more in reader.decode_value(saved.entries["others"]).items():
        optimizer.state[places[name]].update(more)
    for group, said in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in said.items() if name in group and name != "params"})


def _restore_data(run: CheckpointView, said: Any) -> bool:
    if said is None or run.reads is None:
        return True
    stands = {
        tuple(client): ReaderPosition(total, drawn, early, _decode_rng_states(opened), _decode_rng_states(began), last)
        for client, (total, drawn, early, opened, began, last) in said["stands"]
    }
    written = tuple(map(int, said["began"]))
    batch, seed, step, used = written if len(written) != 3 else (*written, 0)  # older versions wrote 3
    chance, taken = _decode_rng_states(said["chance"]), int(said["taken"])
    return run.reads.restore_positions((batch, seed, step, used), chance, stands, taken)


def _decode_rng_states(said: Any) -> Numbers | None:
    if said is None:
        return None
    torchs, (name, keys, *rest), (version, numbers, gauss) = said
    position, has, cached = rest
    numpys = name, keys.numpy().astype("uint32"), int(position), int(has), float(cached)
    return torchs, numpys, (version, tuple(numbers.tolist()), gauss)


def open_image(checkpoint: Checkpoint, files: CheckpointFiles, rank: int, alone: bool = False) -> RestoredState:
    """Opens a rank's image. If `alone`, closing it closes `files`."""
    mine = checkpoint.each[0 if checkpoint.kind == "whole" else rank]
    items: list[Any] = mine["items"]

    def tensor(number: int) -> Tensor:
        read = [read_blob(blob, files) for blob in (checkpoint.blobs[number] for number in items[number][1])]
        return read[0] if len(read) == 1 else torch.cat([x.reshape(-1) for x in read])

    close = files.close if alone else lambda: None
    return RestoredState(str(checkpoint.path), checkpoint.kind, mine["said"], checkpoint.made, tensor, close,
                    checkpoint.said.get("reads"), files.damage)  # fmt: skip


def read_blob(blob: Blob, files: CheckpointFiles) -> Tensor:
    """Raises RunError if its file is damaged."""
    dtype = getattr(torch, blob.dtype)
    if not blob.nbytes:
        return torch.zeros(blob.sizes, dtype=dtype)
    return torch.frombuffer(files.read(blob), dtype=dtype).view(blob.sizes)
