"""A model comes to lie in stages or slices, in others, or whole again, between two steps and by one `move`.

What moves is the state of the run: parameters, buffers and what the optimizer remembers, each bit as it was. A
parameter that lies on another stage is absent here (workbench.host.absent): it has its shape and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from workbench.compressors import inside
from workbench.experiment import Experiment
from workbench.host import absent, sliced
from workbench.host.canonical import Disagreement
from workbench.host.checkpointing import units_of
from workbench.host.handover import averaged, kept_slots, summed
from workbench.host.layout import Place
from workbench.host.move import State, move
from workbench.host.plan import plan
from workbench.host.recomputing import recomputed
from workbench.host.sliced import numel_of, shape_of
from workbench.host.slices import Slice
from workbench.host.slots import likes, put, slots
from workbench.host.spread import Spread, placed, spread_of
from workbench.host.tables import tables_of
from workbench.host.trying import check, check_parts
from workbench.host.trying_units import require_narrow
from workbench.rank import Part, StrategyError
from workbench.settings import KnobError
from workbench.tasks import at_rate, rate

OUTER = "outer"  # what an outer momentum is called among what moves


def refuses_model(e: Experiment, model: nn.Module, learner: Any) -> str | None:
    """Why the model, or a rank's part of it, cannot be trained as `e` says, in a sentence that says what would do."""
    shapes = {name: shape_of(p) for name, p in model.named_parameters() if p.requires_grad}
    spread = spread_of(e, model, learner)
    for rank in range(len(spread)) if spread else (0,):
        mine = spread.trained(rank, set(shapes)) if spread else set(shapes)
        if spread and not mine:
            return _barren(e, spread, rank)
        here = {name: spread.local(name, shape) if spread else shape for name, shape in shapes.items() if name in mine}
        parts = [Part(name, shape, 0, prod(shape)) for name, shape in here.items()]
        said = [e.strategy.refuses_model(parts), *(c.refuses_model(parts) for c in inside(e.compressor))]
        if reason := next((reason for reason in said if reason), None):
            return f"{reason} (of a rank's part: a replica lies in {spread})" if spread else reason
    return None


def _barren(e: Experiment, spread: Spread, rank: int) -> str:
    stage, index = spread.place(rank)
    said = f"partition={type(e.partition).__name__}: slice {index} of {e.partition.slices}"
    said += f" of stage {stage}" if spread.stages else ""
    would = "other cuts, fewer stages, or of=Whole()" if spread.stages else "partition=Whole()"
    return (
        f"{said} would have nothing to train, for no matrix there is dealt out and others look after what is "
        f"whole; take {would}, or deal out more of the model's matrices"
    )


def able(run: Any, wanted: Experiment) -> None:
    """Raises KnobError where `run`'s model cannot be trained as `wanted` says, or cannot come to lie so."""
    if reason := refuses_model(wanted, run.model, run.learner):
        raise KnobError(reason)
    here = {n: p for n, p in run.model.named_parameters() if p.requires_grad and not isinstance(p, absent.Absent)}
    if reason := wanted.strategy.refuses_values({n: p.detach() for n, p in here.items()}):
        raise KnobError(reason)
    require_narrow(run, wanted)
    try:
        tables_of(run.learner, wanted, run.layout)
    except StrategyError as error:
        raise KnobError(f"strategy={type(wanted.strategy).__name__}: {error}") from None
    now, way = run.experiment, wanted.partition
    if way.size > 1 and (not run.spread or (way, wanted.batch) != (now.partition, now.batch)):
        _require_tried(run, wanted)
    if wanted.strategy.by_pieces and not _sizes_only(run):
        _require_parts(run, wanted)
    spread = spread_of(wanted, run.model, run.learner)
    units_of(run.model, run.learner, way)
    recomputed(wanted, run.learner, spread.split if spread else None)
    if moves(now, wanted):
        _ask_slots(run, wanted)


_TRIED: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()  # by a task's functions: why not, or ""


def _require_tried(run: Any, wanted: Experiment) -> None:
    """Tries one batch, whole and spread, once for each way to spread."""
    way = wanted.partition

    def tried(model: nn.Module, batch: Any) -> None:
        spread = spread_of(wanted, model, run.learner)
        assert spread is not None
        check(model, run.learner, spread, batch, way.micro_batches)

    _once(run, wanted, (way.dims(), way.pieces, way.cuts, way.sequences, way.micro_batches, _sizes_only(run)), tried)


def _require_parts(run: Any, wanted: Experiment) -> None:
    """Tries one batch, whole and part by part."""
    said = f"strategy={type(wanted.strategy).__name__}"
    _once(run, wanted, said, lambda model, batch: check_parts(model, run.learner, batch, said))


def _once(run: Any, wanted: Experiment, what: Any, tried: Callable[[nn.Module, Any], None]) -> None:
    """Tries something on a model of its own, whatever lies here, and raises the same KnobError when asked again."""
    made = _TRIED.setdefault(run.learner, {})
    if (key := (what, wanted.batch)) not in made:
        made[key] = _tried(run, wanted, tried)
    if made[key]:
        raise KnobError(made[key])


def _tried(run: Any, wanted: Experiment, tried: Callable[[nn.Module, Any], None]) -> str:
    batch, learner = run.example(wanted), run.learner
    with torch.random.fork_rng():
        torch.manual_seed(wanted.seed)
        model = run.model if _sizes_only(run) else learner.model().to(run.layout.order[0].param.device).train()
        try:
            tried(model, batch)
        except KnobError as error:
            return str(error)
    return ""


def _ask_slots(run: Any, wanted: Experiment) -> None:
    """Refuses in words what an optimizer remembers in a shape that no other rank could tell."""
    shapes = {place.name: place.param.shape for place in run.layout.order}
    for name, x in slots(run.layout, run.optimizer).items():
        if x.numel() > 1 and x.shape != shapes[name.partition("/")[2]]:
            raise KnobError(
                f"partition={type(wanted.partition).__name__}: {type(run.optimizer).__name__} remembers {name} in a "
                f"shape of its own, which does not show how to hand it over; take optimizer=AdamW() or SGD()"
            )


def moves(was: Experiment, wanted: Experiment) -> bool:
    """Does a model lie otherwise under `wanted`?"""
    one, other = ((way.dims(), way.pieces, way.cuts, way.sequences) for way in (was.partition, wanted.partition))
    return one != other


class _Moved(NamedTuple):
    """What there is to move. here: what this rank has of it; slots: the names of those of the optimizer.

    sizes: elements of everything, on every rank alike; like: a tensor of the dtype of each
    """

    sizes: dict[str, int]
    like: State
    here: State
    slots: list[str]


async def repartition(run: Any, was: Spread | None, to: Spread | None, outer: State | None = None) -> State | None:
    """The model comes to lie as `to` says. All ranks stand at the same boundary, and replicas are alike.

    outer: an outer momentum of what lies here, by parameter -> the same of what lies here then
    """
    rank, everyone, began = run.rank, range(run.rank.size), run.now
    await _agree_on_buffers(run, was)
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    what = await _collected(run, trained, outer)
    if was is None and to is not None and _sizes_only(run):
        return _cut_out(run, trained, what, to, began)
    lies, comes = (placed(tuple(what.sizes.items()), each, rank.size) for each in (was, to))
    if _sizes_only(run):
        here = {name: what.like[name].new_empty(lies.numel(rank.id, name)) for name in lies.at(rank.id)}
        what = what._replace(here=here)
    before = await summed(run, what.here, lies)
    held = {name: what.here[name] for name in lies.at(rank.id)}
    given = await move(rank, held, lies, comes, everyone, what.like)
    run.ledger.surge(sum(x.numel() * x.element_size() for name, x in held.items() if given.get(name) is not x))
    if await summed(run, given, comes) != before:
        raise Disagreement("the model's state is not what it was before it was spread anew")
    mine = to.trained(rank.id, set(trained)) if to else set(trained)
    _settle(run, trained, given, mine, to, what)
    widths = {name: what.like[name].element_size() for name in comes.sizes}
    sent = sum(map(sum, plan(lies, comes, everyone, widths).lengths(tuple(everyone)))) if rank.id == 0 else 0
    _tell(run, to, sent, began)
    return _outer(given, mine)


def _cut_out(run: Any, trained: dict[str, nn.Parameter], what: _Moved, to: Spread, began: float) -> State | None:
    """With sizes only, each rank keeps its part of what all have whole: nobody lacks anything, and none is asked."""
    rank = run.rank
    wants = placed(tuple(what.sizes.items()), to, len(to)).at(rank.id % len(to))
    stays = {name for name, slices in wants.items() if slices == (Slice(0, what.sizes[name]),)}
    given = {name: what.like[name].new_empty(sum(s.numel for s in slices)) for name, slices in wants.items()}
    run.ledger.surge(sum(n * what.like[name].element_size() for name, n in what.sizes.items() if name not in stays))
    mine = to.trained(rank.id, set(trained))
    _settle(run, trained, given, mine, to, what)
    _tell(run, to, 0, began)
    return _outer(given, mine)


def _tell(run: Any, to: Spread | None, nbytes: int, began: float) -> None:
    """How the model lies now, what went between ranks for it, and how long that took rank 0, into its record."""
    if run.rank.id == 0:
        text = f"each replica lies in {to}" if to else "every rank holds the whole model"
        stages, slices = len(to.stages) if to and to.stages else 1, to.split.ways if to and to.split else 1
        said = {"stages": stages, "slices": slices, "nbytes": nbytes, "seconds": run.now - began}
        run.mark("partition", said | {"text": text})


def _outer(given: State, mine: set[str]) -> State | None:
    return {name: given[f"{OUTER}/{name}"] for name in mine if f"{OUTER}/{name}" in given} or None


def _sizes_only(run: Any) -> bool:
    """Does one model stand for those of all ranks, and stays as it is?"""
    return bool(run.layout.order[0].param.is_meta)


def _buffers(run: Any) -> State:
    return {name: b for name, b in run.model.named_buffers() if b.numel()}


async def _agree_on_buffers(run: Any, was: Spread | None) -> None:
    """Running statistics, of which each replica has its own, become one value."""
    rank, here = run.rank, _buffers(run)
    if was and was.stages:
        stage, _ = was.place(rank.id)
        here = {name: b for name, b in here.items() if name in was.stages.names[stage]}
    if rank.replicas.size > 1 and here:
        await averaged(rank.replicas, list(here.values()), "buffers")


async def _collected(run: Any, trained: dict[str, nn.Parameter], outer: State | None) -> _Moved:
    buffers, here = _buffers(run), slots(run.layout, run.optimizer)
    places = [Place(name, p) for name, p in trained.items()]
    like = likes(places, run.make_optimizer(run.experiment, list(trained.values())))
    kept = await kept_slots(run, like, here)
    if _sizes_only(run):  # one optimizer stands for all ranks', which may not have stepped yet
        kept = list(like) if any(await run.gather(int(run.ledger.remembers))) else []
    sizes = {name: numel_of(p) for name, p in trained.items()} | {name: b.numel() for name, b in buffers.items()}
    sizes |= {name: like[name].numel() or numel_of(trained[name.partition("/")[2]]) for name in kept}
    like = {**{name: absent.data_of(p) for name, p in trained.items()}, **buffers, **like}
    here = {place.name: place.param.data for place in run.layout.order} | buffers | here
    if any(await run.gather(int(bool(outer)))):  # some may have none yet
        wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in trained.items()}
        sizes |= {f"{OUTER}/{name}": numel_of(p) for name, p in trained.items()}
        like |= {f"{OUTER}/{name}": torch.empty(0, dtype=wide[name], device=p.device) for name, p in trained.items()}
        for place in run.layout.order:
            none = torch.zeros(place.numel, dtype=wide[place.name], device=place.param.device)
            here[f"{OUTER}/{place.name}"] = (outer or {}).get(place.name, none).to(none.dtype)
    return _Moved(sizes, like, here, kept)


def _settle(run: Any, trained: dict[str, nn.Parameter], given: State, mine: set[str], to: Spread | None,
            what: _Moved) -> None:  # fmt: skip
    """This rank goes on with what it was given."""
    if _sizes_only(run):
        run.relaid(mine, to)
        return
    buffers = _buffers(run)
    with torch.no_grad():
        for name in buffers.keys() & given.keys():
            buffers[name].copy_(given[name].view(buffers[name].shape))
        _lay(trained, given, mine, to, to.followed(run.rank.id, set(trained)) if to else set())
    run.relaid(mine, to)
    made = run.make_optimizer(run.experiment)
    if rate(made) != run.rank.lr:
        at_rate(made, run.rank.lr)
    run.use_optimizer(made)
    put(run.layout, made, {name: given[name] for name in what.slots if name in given}, what.like)


def _lay(trained: dict[str, nn.Parameter], given: State, mine: set[str], to: Spread | None,
         followed: set[str]) -> None:  # fmt: skip
    """These parameters are here, with the values that were given; those `followed` are to be told; no others are."""
    for name, p in trained.items():
        shape = shape_of(p)
        if name in mine:
            absent.come(p)
            sliced.lay(p, given[name].view(to.local(name, shape) if to else shape), shape)
        elif name in followed:
            absent.come(p)
            sliced.lay(p, given.get(name, torch.empty(shape, dtype=p.dtype, device=p.device)).view(shape), shape)
        else:
            nothing = absent.data_of(p).new_full((1,), torch.nan).expand(shape)
            absent.leave(p, _elsewhere)
            with absent.unasked():
                sliced.lay(p, nothing, shape)


def _elsewhere(params: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    shape = tuple(params[0].shape)
    raise StrategyError(
        f"a parameter of shape {shape} is read that lies on another stage: parts of a pipeline, and `evaluate`, may "
        f"read a model only by calling it; let it be in the part that reads it, or take partition=Whole()"
    )
