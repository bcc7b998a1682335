"""Restores a rank from its own image, bit-identical, or from the whole image of another number of ranks.

Data from a disk is not trusted: names, sizes and kinds must match the run, else KnobError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.compressors import inside
from workbench.host.checkpoint.image import beside, parameters
from workbench.host.checkpoint.tree import Reader
from workbench.host.checkpoint.views import CheckpointView
from workbench.host.core.dealing import NO_INDEX, may_come_again
from workbench.host.core.views import RankView
from workbench.host.memory.batches import Numbers, Stand
from workbench.host.memory.budget import OutOfMemory
from workbench.host.reconfigure.unfreezing import unfreeze
from workbench.host.sharding.trial import Trial
from workbench.settings import Change, KnobError
from workbench.settings.said import text_of
from workbench.tasks import at_rate

FITS_NOT = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)  # of a misfit
SAY_WHY = (OutOfMemory, torch.OutOfMemoryError)  # errors that already name their own cause
OF_MACHINE = ("can't allocate memory", "CUDA error", "NCCL error")  # in a RuntimeError of torch
OUTER, OWED = "outer", "owed"  # in a whole image: an outer momentum; residuals by heir


class Regained:
    """A rank's image, read back.

    whole:  whether it is of a whole model, gathered from another number of ranks
    made:   the earlier changes, as JSON
    reads:  the order in which a step reads parameters, as JSON; None: they were whole, or an older version wrote it
    tensor: returns the tensor of a number, flat if it is in several pieces
    close:  ends reading
    damage: the error that `tensor` raises if a file is damaged
    """

    def __init__(self, path: str, kind: str, said: Mapping[str, Any], made: list[dict[str, Any]],
                 tensor: Callable[[int], Tensor], close: Callable[[], None], reads: Any = None,
                 damage: type[Exception] = OSError) -> None:  # fmt: skip
        self.reads, self.damage = reads, damage
        self.path, self.whole, self.said, self.made = path, kind == "whole", said, made
        self.tensor, self.close = tensor, close

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Inside, an image that does not fit raises KnobError with the checkpoint's name.

        If a device runs out of memory or a file is damaged, the settings are not the cause. Such an error passes
        unchanged.
        """
        try:
            yield
        except FITS_NOT as error:
            if isinstance(error, (*SAY_WHY, self.damage)) or any(words in text_of(error) for words in OF_MACHINE):
                raise
            said = f"it holds no {error}" if isinstance(error, KeyError) else str(error).split("\n")[0]
            raise KnobError(f"resume={self.path}: does not fit this run: {said}; resume with the settings and the task "
                            f"that it was made with, and change them afterwards") from error  # fmt: skip

    @property
    def used(self) -> int:
        """How many examples of the data's order were used up."""
        with self.refusing():
            return int(self.said.get("used", 0))

    def reader(self, run: RankView) -> Reader:
        e = run.experiment
        members = (e.strategy, e.optimizer, e.policy, *inside(e.compressor), *inside(run.rank.compressor))
        return Reader(self.tensor, {type(one).__module__ for one in members})

    # -- before shards are cut --

    def begin(self, run: CheckpointView) -> None:
        """Before the strategy starts: restores the step, and a whole image's state.

        Shards are cut by the order in which a step reads parameters. It comes from the checkpoint, because a loss that
        reads a tensor's value cannot be traced before the first step.
        """
        with self.refusing():
            run.rank.step = int(self.said["step"])
            if self.reads is not None and not self.whole:
                run.reading.trial = _order_of_reading(self.reads, run.model)
        if self.whole:
            with self.refusing(), torch.no_grad():
                _values(run, self)
                _remembered(run, self)
                run.restart_data(self.used)
            if run.rank.id == 0 and not run.learner.indexed:
                run.mark("data", may_come_again(NO_INDEX))

    async def order(self, run: CheckpointView) -> None:
        """Before shards are cut: restores the order of buckets."""
        if self.whole:
            return
        with self.refusing():
            names = [str(name) for name in self.said["order"]]
            unfreeze(run, names)
            here = [place.name for place in run.layout.order]
            if sorted(names) != sorted(here):
                raise ValueError(f"its model has parameters {_few(names)}, and this one {_few(here)}")
        if any(await run.gather(int(names != here))):
            await run.relay_in(names)

    # -- before the first step --

    async def take(self, run: CheckpointView, anew: bool = True) -> None:
        """Before the first step: restores all state except random numbers, which `settle` restores.

        anew: the run begins with it; else the learning rate and the position in the data stay
        """
        e, reader = run.experiment, self.reader(run)
        await e.strategy.recall(run.rank.replicas, run.state)
        if e.strategy.opaque:
            await run.leave_opaque()
        with self.refusing(), torch.no_grad():
            if self.whole:
                self._take_over(run, reader)
            else:
                _values(run, self)
                _remembered(run, self)
                run.state = reader.read(self.said["state"])
                run.rank.memory.clear()
                reader.into(run.rank.memory, self.said["memory"])
                if anew:
                    self._stand(run, reader)
                else:
                    at_rate(run.optimizer, run.rank.lr)
        if e.strategy.opaque:
            run.enter_opaque()
        run.choose_lane()
        await run.gather(0)  # no rank may read another's memory before it is restored

    def _stand(self, run: CheckpointView, reader: Reader) -> None:
        """Restores the rank's position in its steps and its data."""
        vars(run.rate).update(_named(reader.read(self.said["rate"]), vars(run.rate)))
        run.finite.know(reader.read(self.said.get("first")))
        vars(run.measuring).update(_named(reader.read(self.said["measuring"]), vars(run.measuring)))
        run.flushing = int(self.said["flushing"])
        if run.flushing:
            run.rank.compressor = reader.read(self.said["compressor"])
        run.rank.lr = float(self.said["lr"])
        same = _stood(run, reader.read(self.said["data"]))
        if not same:
            why = f"the data of rank {run.rank.number()} yield other batches when they are read again"
            run.mark("data", may_come_again(why))

    def _take_over(self, run: CheckpointView, reader: Reader) -> None:
        """Restores what another number of ranks hands on: an outer momentum, and compression residuals."""
        rank, more = run.rank, reader.read(self.said["more"])
        if more[OUTER] is not None:
            run.experiment.strategy.takes(rank.replicas, run.state, more[OUTER])
        mine = more[OWED].get(rank.id, {})
        kept = {c.residual for c in inside(run.experiment.compressor)}
        rank.memory.buffers.update({name: found for name, found in mine.items() if name in kept})
        vars(run.rate).update(_named(reader.read(self.said["rate"]), vars(run.rate)))
        run.finite.know(reader.read(self.said.get("first")))

    def settle(self, run: CheckpointView) -> None:
        """Last of all before the first step: restores the policy and random numbers."""
        if self.whole:
            return
        with self.refusing():
            reader = self.reader(run)
            kept = reader.read(self.said["policy"])
            own = [{**plain, "at_step": step} for step, plain in kept.pop("made", ())]  # as older versions wrote them
            run.steering.regain(kept, [Change.read(plain, int(plain["at_step"])) for plain in self.made or own])
            run.join_crowd(reader.read(self.said["crowd"]))
            run.draw_on(_states(reader.read(self.said["draws"])))


def _order_of_reading(said: Any, model: nn.Module) -> Trial:
    """Returns a step's order of reading. Raises ValueError if `model` lacks a parameter."""
    trial = Trial.read(said)
    if other := sorted(set(trial.names()) - {name for name, _ in model.named_parameters()}):
        raise ValueError(f"it reads {_few(other)}, and this model has no such parameters")
    return trial


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _named(said: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the written values of attributes that still exist."""
    return {name: value for name, value in said.items() if name in known}


def _values(run: RankView, saved: Regained) -> None:
    """Restores parameters, buffers and frozen parameters."""
    for what, here in (("parameters", ((n, x) for n, x, _ in parameters(run))), ("beside", beside(run))):
        numbers = dict(saved.said[what])
        for name, x in here:
            given = saved.tensor(numbers.pop(name))
            if given.numel() != x.numel() or given.dtype != x.dtype:
                raise ValueError(f"{name} has {x.numel()} elements of {x.dtype} here, and {given.numel()} of "
                                 f"{given.dtype} there")  # fmt: skip
            x.copy_(given.view(x.shape))
        if numbers:
            raise ValueError(f"it has {_few(list(numbers))}, and this run has not")


def _remembered(run: RankView, saved: Regained) -> None:
    """Restores the optimizer's state and settings."""
    optimizer, places = run.optimizer, {place.name: place.param for place in run.layout.order}
    reader = saved.reader(run)
    groups = reader.read(saved.said["groups"])
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"its optimizer has {len(groups)} groups, and this one {len(optimizer.param_groups)}")
    optimizer.state.clear()
    for name, (number, shape, on) in saved.said["slots"].items():
        slot, _, of = name.partition("/")
        x = saved.tensor(number).view(tuple(shape))
        optimizer.state[places[of]][slot] = x.to(places[of].device) if on != "cpu" else x
    for name, more in reader.read(saved.said["others"]).items():
        optimizer.state[places[name]].update(more)
    for group, said in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in said.items() if name in group and name != "params"})


def _stood(run: CheckpointView, said: Any) -> bool:
    """Restores the rank's position in its data. Returns whether the last batches are equal."""
    if said is None or run.reads is None:
        return True
    stands = {tuple(client): Stand(total, drawn, early, _states(opened), _states(began), last)
              for client, (total, drawn, early, opened, began, last) in said["stands"]}  # fmt: skip
    written = tuple(map(int, said["began"]))
    batch, seed, step, used = written if len(written) != 3 else (*written, 0)  # an older version wrote 3
    same = run.reads.stand((batch, seed, step, used), _states(said["chance"]), stands)
    run.reads.taken = int(said["taken"])
    return same


def _states(said: Any) -> Numbers | None:
    """Converts states of random numbers back from `image.numbers`."""
    if said is None:
        return None
    torchs, (name, keys, *rest), (version, numbers, gauss) = said
    position, has, cached = rest
    numpys = name, keys.numpy().astype("uint32"), int(position), int(has), float(cached)
    return torchs, numpys, (version, tuple(numbers.tolist()), gauss)


def regained(checkpoint: Any, files: Any, rank: int, alone: bool = False) -> Regained:
    """Returns the image that rank `rank` resumes from.

    checkpoint, files: a Checkpoint of workbench.record.checkpoints and its Bytes, which the rank closes if `alone`
    """
    mine = checkpoint.each[0 if checkpoint.kind == "whole" else rank]
    items: list[Any] = mine["items"]

    def tensor(number: int) -> Tensor:
        read = [blob_tensor(blob, files) for blob in (checkpoint.blobs[number] for number in items[number][1])]
        return read[0] if len(read) == 1 else torch.cat([x.reshape(-1) for x in read])

    close = files.close if alone else lambda: None
    return Regained(str(checkpoint.path), checkpoint.kind, mine["said"], checkpoint.made, tensor, close,
                    checkpoint.said.get("reads"), files.damage)  # fmt: skip


def blob_tensor(blob: Any, files: Any) -> Tensor:
    """Returns the tensor of a Blob's bytes. Raises RunError if its file is damaged."""
    dtype = getattr(torch, blob.dtype)
    if not blob.nbytes:
        return torch.zeros(blob.sizes, dtype=dtype)
    return torch.frombuffer(files.read(blob), dtype=dtype).view(blob.sizes)
