"""A model comes to lie in stages, in others, or whole again, between two steps and by one `move`.

What moves is the state of the run: parameters, buffers and what the optimizer remembers, each bit as it was. A
parameter that lies on another stage is absent here (workbench.host.absent): it has its shape and no memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from workbench.compressors import inside
from workbench.experiment import Experiment
from workbench.host import absent
from workbench.host.canonical import Disagreement
from workbench.host.cutting import Stages, cut
from workbench.host.handover import averaged, kept_slots, summed
from workbench.host.layout import Place
from workbench.host.move import State, move
from workbench.host.piece import micro_batches
from workbench.host.placement import Placement
from workbench.host.plan import plan
from workbench.host.slots import likes, put, slots
from workbench.host.trying import check
from workbench.rank import Part, StrategyError
from workbench.settings import KnobError
from workbench.tasks import TaskError, at_rate, rate

OUTER = "outer"  # what an outer momentum is called among what moves


def stages_of(e: Experiment, model: nn.Module, learner: Any) -> Stages | None:
    """Where `e` cuts `model`; None where a replica is whole. Raises KnobError where it cannot be cut so."""
    return cut(e, model, learner) if e.partition.size > 1 else None


def refuses_model(e: Experiment, model: nn.Module, learner: Any) -> str | None:
    """Why the model, or a stage of it, cannot be trained as `e` says, in words that say what would do; or None."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stages = stages_of(e, model, learner)
    for names in stages.names if stages else (frozenset(trained),):
        parts = [Part(name, tuple(p.shape), 0, p.numel()) for name, p in trained.items() if name in names]
        said = [e.strategy.refuses_model(parts), *(c.refuses_model(parts) for c in inside(e.compressor))]
        if reason := next((reason for reason in said if reason), None):
            return f"{reason} (of a stage: a replica lies in {len(stages)})" if stages else reason
    return None


def able(run: Any, wanted: Experiment) -> None:
    """Raises KnobError where `run`'s model cannot be trained as `wanted` says, or cannot come to lie so."""
    if reason := refuses_model(wanted, run.model, run.learner):
        raise KnobError(reason)
    now, way = run.experiment, wanted.partition
    if way.size > 1 and (not run.stages or (way, wanted.batch) != (now.partition, now.batch)):
        _try(run, wanted)
    if moves(now, wanted):
        _ask_slots(run, wanted)


def _try(run: Any, wanted: Experiment) -> None:
    """One batch, whole and in stages; where the model is not whole here, that the batch can be cut."""
    batch, count = run.example(wanted), wanted.partition.micro_batches
    if not any(isinstance(p, absent.Absent) for p in run.model.parameters()):
        return check(run.model, run.learner, cut(wanted, run.model, run.learner), batch, count)
    try:
        micro_batches(batch, count)
    except TaskError as error:
        raise KnobError(str(error)) from error


def _ask_slots(run: Any, wanted: Experiment) -> None:
    """Refuses in words what an optimizer remembers in a shape that no other rank could tell."""
    for name, x in slots(run.layout, run.optimizer).items():
        if x.numel() > 1 and x.shape != run.model.get_parameter(name.partition("/")[2]).shape:
            raise KnobError(
                f"partition={type(wanted.partition).__name__}: {type(run.optimizer).__name__} remembers {name} in a "
                f"shape of its own, which does not show how to hand it over; take optimizer=AdamW() or SGD()"
            )


def moves(was: Experiment, wanted: Experiment) -> bool:
    """Does a model lie otherwise under `wanted`?"""
    one, other = was.partition, wanted.partition
    return (one.dims(), one.pieces) != (other.dims(), other.pieces)


class _Moved(NamedTuple):
    """What there is to move. here: what this rank has of it; slots: the names of those of the optimizer.

    sizes: elements of everything, on every rank alike; like: a tensor of the dtype of each
    """

    sizes: dict[str, int]
    like: State
    here: State
    slots: list[str]


async def repartition(run: Any, was: Stages | None, to: Stages | None, outer: State | None = None) -> State | None:
    """The model comes to lie as `to` says. All ranks stand at the same boundary, and replicas are alike.

    outer: an outer momentum of what lies here, by parameter -> the same of what lies here then
    """
    rank, everyone = run.rank, range(run.rank.size)
    await _agree_on_buffers(run, was)
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    what = await _collected(run, trained, outer)
    lies, comes = (_placed(tuple(what.sizes.items()), each.names if each else (), rank.size) for each in (was, to))
    if _sizes_only(run):
        what = what._replace(here={name: what.like[name].new_empty(what.sizes[name]) for name in lies.at(rank.id)})
    before = await summed(run, what.here, lies)
    held = {name: what.here[name] for name in lies.at(rank.id)}
    given = await move(rank, held, lies, comes, everyone, what.like)
    if await summed(run, given, comes) != before:
        raise Disagreement("the model's state is not what it was before it was spread anew")
    mine = set(trained) if to is None else set(trained) & to.names[rank.id % len(to)]
    _settle(run, trained, given, mine, to, what)
    if rank.id == 0:
        widths = {name: what.like[name].element_size() for name in comes.sizes}
        nbytes = sum(map(sum, plan(lies, comes, everyone, widths).lengths(tuple(everyone))))
        text = f"each replica lies in {len(to)} stages: {to}" if to else "every rank holds the whole model"
        run.mark("partition", {"stages": len(to) if to else 1, "nbytes": nbytes, "text": text})
    momentum = {name: given[f"{OUTER}/{name}"] for name in mine if f"{OUTER}/{name}" in given}
    return momentum or None


def _sizes_only(run: Any) -> bool:
    """Does one model stand for those of all ranks, and stays as it is?"""
    return bool(run.layout.order[0].param.is_meta)


def _buffers(run: Any) -> State:
    return {name: b for name, b in run.model.named_buffers() if b.numel()}


async def _agree_on_buffers(run: Any, was: Stages | None) -> None:
    """Running statistics, of which each replica has its own, become one value."""
    rank, found = run.rank, _buffers(run)
    here = found if was is None else {name: b for name, b in found.items() if name in was.names[rank.id % len(was)]}
    if rank.replicas.size > 1 and here:
        await averaged(rank.replicas, list(here.values()), "buffers")


async def _collected(run: Any, trained: dict[str, nn.Parameter], outer: State | None) -> _Moved:
    buffers, here = _buffers(run), slots(run.layout, run.optimizer)
    places = [Place(name, p) for name, p in trained.items()]
    like = likes(places, run.make_optimizer(run.experiment, list(trained.values())))
    kept = await kept_slots(run, like, here)
    if _sizes_only(run) and kept:
        kept = list(like)
    sizes = {name: p.numel() for name, p in trained.items()} | {name: b.numel() for name, b in buffers.items()}
    sizes |= {name: like[name].numel() or trained[name.partition("/")[2]].numel() for name in kept}
    like = {**{name: absent.data_of(p) for name, p in trained.items()}, **buffers, **like}
    here = {place.name: place.param.data for place in run.layout.order} | buffers | here
    if any(await run.gather(int(bool(outer)))):  # some may have none yet
        wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in trained.items()}
        sizes |= {f"{OUTER}/{name}": p.numel() for name, p in trained.items()}
        like |= {f"{OUTER}/{name}": torch.empty(0, dtype=wide[name], device=p.device) for name, p in trained.items()}
        for place in run.layout.order:
            none = torch.zeros(place.numel, dtype=wide[place.name], device=place.param.device)
            here[f"{OUTER}/{place.name}"] = (outer or {}).get(place.name, none).to(none.dtype)
    return _Moved(sizes, like, here, kept)


def _settle(run: Any, trained: dict[str, nn.Parameter], given: State, mine: set[str], to: Stages | None,
            what: _Moved) -> None:  # fmt: skip
    """This rank goes on with what it was given."""
    if _sizes_only(run):
        run.relaid(mine, to)
        return
    buffers = _buffers(run)
    with torch.no_grad():
        for name in buffers.keys() & given.keys():
            buffers[name].copy_(given[name].view(buffers[name].shape))
        _lay(trained, given, mine)
    run.relaid(mine, to)
    made = run.make_optimizer(run.experiment)
    if rate(made) != run.rank.lr:
        at_rate(made, run.rank.lr)
    run.use_optimizer(made)
    put(run.layout, made, {name: given[name] for name in what.slots if name in given}, what.like)


@lru_cache(maxsize=4)  # the ranks of a simulation all ask for the same
def _placed(named: tuple[tuple[str, int], ...], stages: tuple[frozenset[str], ...], size: int) -> Placement:
    """Where everything lies: what belongs to a parameter lies with it; what is of no stage lies everywhere."""
    sizes = dict(named)
    if not stages:
        return Placement.whole(sizes, range(size))
    count = len(stages)
    owner = {name: stage for stage, names in enumerate(stages) for name in names}
    of = {name: owner.get(name.partition("/")[2] or name, -1) for name in sizes}
    placed = Placement({}, {})
    for stage in range(count):
        own = {name: n for name, n in sizes.items() if of[name] == stage}
        placed |= Placement.whole(own, range(stage, size, count))
    return placed | Placement.whole({name: n for name, n in sizes.items() if of[name] < 0}, range(size))


def _lay(trained: dict[str, nn.Parameter], given: State, mine: set[str]) -> None:
    """These parameters are here, with the values that were given, and no others."""
    for name, p in trained.items():
        if name in mine:
            absent.come(p)
            p.data = given[name].view(p.shape)
        else:
            nothing = absent.data_of(p).new_full((1,), torch.nan).expand(p.shape)
            absent.leave(p, _elsewhere)
            with absent.unasked():
                p.grad, p.data = None, nothing


def _elsewhere(params: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    shape = tuple(params[0].shape)
    raise StrategyError(
        f"a parameter of shape {shape} is read that lies on another stage: parts of a pipeline, and `evaluate`, may "
        f"read a model only by calling it; let it be in the part that reads it, or take partition=Whole()"
    )
