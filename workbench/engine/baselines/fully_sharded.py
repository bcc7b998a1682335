"""Trains a copy of the model with torch's own `fully_shard`, as a baseline.

[Note: Two models] `fully_shard` changes a model in place for good, so a copy of the model trains. The run's own model
has no values of trained parameters, and reading one raises StrategyError. All ranks fetch the copy's values together
before an evaluation, a switch and the end. Both models share buffers and frozen parameters. The copy's optimizer works
on torch's DTensors. The run's optimizer has no state during this time.

[Note: Parameters that stay whole] fully_shard refuses scalars, parameters without elements, and several element types
in one unit. Each rank keeps these parameters whole. After a backward the ranks average their gradients.

[Note: A mesh without a name service] fully_shard takes a DeviceMesh, which wants torch's default process group. A
process has only one, but ranks may be threads of one process. So the mesh has no backend. Until `end` its group is in
torch's private table of groups, under its own name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from workbench.engine.baselines.baseline_view import BaselineView
from workbench.engine.baselines.fsdp_hooks import GradientListener, copy_attributes, give_gradient
from workbench.engine.baselines.units import UnitRounds, find_units, find_unshardable, list_packed
from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.wire import Wire
from workbench.host.placement import unmaterialized
from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.rank import Op, StrategyError, as_real
from workbench.tasks import at_rate, rate, same_groups


class FullySharded:
    """The copy that trains, from `enter_opaque` to `leave_opaque`. See [Note: Two models].

    module:    the copy; forward calls it
    optimizer: the optimizer of its shards
    alive:     returns the bytes of live activations, if the memory account measures this backward
    """

    def __init__(self, run: BaselineView, wire: Wire, lane: Lane | None) -> None:
        self._run, self._wire, self._lane, self._own = run, wire, lane, run.optimizer
        model: nn.Module = run.model
        layout = run.layout
        names = {place.name for place in layout.order}
        trained = {id(p): nn.Parameter(p.data, p.requires_grad) for n, p in model.named_parameters() if n in names}
        others = {id(x): x for x in (*model.buffers(), *model.parameters()) if id(x) not in trained}
        self.module = copy.deepcopy(model, {**trained, **others})
        self._name: Any = f"fully_shard {id(self)}"
        self._mesh = _make_mesh(wire, self._name)
        self._listener = GradientListener(dict(model.named_parameters()), names)
        self._units: list[list[str]] = []  # by unit, the names of its parameters in torch's order
        self._whole_names: list[str] = []  # see [Note: Parameters that stay whole]
        found = [*find_units(self.module, run.experiment.bucket_mb), self.module]
        labels = {id(module): name or "the rest of the model" for name, module in self.module.named_modules()}
        self._rounds = UnitRounds(run, [labels[id(unit)] for unit in found], self._serve_unit,
                              lambda unit: run.rank.size * sum(self._pad(unit)))  # fmt: skip
        self._shard_units(found, names)
        copied = dict(same_groups(self.module, model).named_parameters())
        self._shards = {n: p for n, p in copied.items() if n in names}
        self._frozen = {p for n, p in copied.items() if n not in names}  # the run's own
        here = {id(p) for group in self._own.param_groups for p in group["params"]}
        trains = [copied[n] for n, p in model.named_parameters() if id(p) in here]
        self.optimizer = run.make_optimizer(run.experiment, trains)
        if rate(self.optimizer) != run.rank.lr:
            at_rate(self.optimizer, run.rank.lr)
        for place in layout.order:
            self._move_state(place)
        self.alive: Callable[[], int] = int
        self.most = 0  # bytes: the peak of gradients plus activations in a measured backward
        self._peak = self._kept = sum(_read_local(p).nbytes for p in self._shards.values())
        run.use_optimizer(self.optimizer)
        self.free_values()

    def _shard_units(self, found: list[nn.Module], trained: set[str]) -> None:
        names = {p: n for n, p in self.module.named_parameters()}
        ignored = {p for p, n in names.items() if n not in trained}
        for number, unit in enumerate(found):
            own = [p for p in list_packed(unit) if p not in ignored]
            whole = find_unshardable(own)
            ignored |= whole
            for p in whole:
                with torch.no_grad():
                    p.set_(p.clone())  # type: ignore[call-overload]  # the run's own buckets let go of theirs
                self._whole_names.append(names[p])
                self._listener.made[names[p]] = p
            self._units.append([names[p] for p in own if p not in whole])
            sharded: Any = fully_shard(unit, mesh=self._mesh, ignored_params=ignored)
            sharded.set_custom_all_gather(_UnitGather(self, number))
            sharded.set_custom_reduce_scatter(_UnitReduce(self, number))
            if self._rounds.needed:  # a rank that only takes part cannot know by what torch divides
                sharded.set_force_sum_reduction_for_comms(True)
                sharded.set_gradient_divide_factor(1.0)
            unit.register_forward_pre_hook(partial(self._before_forward, number))  # after torch gathered it
        if said := getattr(self.module, "set_reduce_scatter_unused_params", None):  # not in every torch
            said(True)  # a parameter that this rank's examples do not use has a gradient on other ranks
        self._whole_names.sort()

    # -- between the run's own and the copy --

    def _move_state(self, place: ParameterPlace) -> None:
        here, shard = self._own.state.pop(place.param, {}), self._shards[place.name]
        sharded = isinstance(shard, DTensor)
        given = {slot: self._cut_rows(x) if sharded and _is_whole(x, place) else x for slot, x in here.items()}
        if given:
            self.optimizer.state[shard] = given

    def _cut_rows(self, x: Tensor) -> DTensor:
        rows = -(-len(x) // self._run.rank.size)
        mine = x[rows * self._run.rank.id :][:rows].clone()
        made: DTensor = DTensor.from_local(mine, self._mesh, [Shard(0)], run_check=False, shape=x.shape,
                                           stride=x.stride())  # fmt: skip
        return made

    def free_values(self) -> None:
        """Frees the values of the trained parameters in the run's own model.

        Plain attributes that an evaluation has changed go to the copy.
        """
        layout = self._run.layout
        copy_attributes(self._run.model, self.module)
        for bucket in layout.list_params():
            layout.hold_bucket(type(bucket)(bucket.index, bucket.data[:0], (), bucket.offset))
            for place in layout.groups[bucket.index]:
                unmaterialized.make_absent(place.param, _refuse_read)
        self._run.memory_account.note_held(self._kept)

    async def fetch_values(self) -> None:
        """Copies trained values and plain attributes into the run's own model. All ranks call it together."""
        layout, memory_account = self._run.layout, self._run.memory_account
        for bucket in layout.list_params():
            places = layout.groups[bucket.index]
            own = [_read_local(self._shards[place.name]) for place in places]
            values = await self._gather_whole(places, own, f"params {bucket.index}")
            layout.hold_bucket(bucket.like(torch.cat([x.reshape(-1) for x in values])))
            for place in places:
                unmaterialized.make_present(place.param)
        copy_attributes(self.module, self._run.model)
        memory_account.note_held(self._kept + layout.held)

    async def return_state(self) -> None:
        """Copies trained values, optimizer state and hooks back to the run. All ranks call it together."""
        run = self._run
        await self.fetch_values()
        self._listener.return_hooks()
        self._own.state.update({p: self.optimizer.state[p] for p in self._frozen if p in self.optimizer.state})
        for index, places in enumerate(run.layout.groups):
            states = [self.optimizer.state.get(self._shards[place.name], {}) for place in places]
            for slot in sorted({name for state in states for name in state}):
                cut = [(p, s[slot]) for p, s in zip(places, states, strict=True) if isinstance(s.get(slot), DTensor)]
                own = [x.to_local() for _, x in cut]
                whole = await self._gather_whole([p for p, _ in cut], own, f"{slot} {index}")
                for (place, _), x in zip(cut, whole, strict=True):
                    self._own.state[place.param][slot] = x
            for place, state in zip(places, states, strict=True):
                self._own.state[place.param].update({n: x for n, x in state.items() if not isinstance(x, DTensor)})
                if not state:
                    del self._own.state[place.param]
        for mine, its in zip(self._own.param_groups, self.optimizer.param_groups, strict=True):
            mine.update({name: x for name, x in its.items() if name != "params"})
        run.use_optimizer(self._own)
        run.memory_account.note_held(run.layout.held)

    def end(self) -> None:
        _unregister_process_group(self._name)

    async def _gather_whole(self, places: list[ParameterPlace], own: list[Tensor], name: str) -> list[Tensor]:
        """Gathers whole tensors from each rank's rows, or clones tensors that each rank keeps whole.

        With p ranks, it sends (p-1)/p of their bytes.
        """
        whole = [x.detach().clone() for x in own]
        cut = [i for i, place in enumerate(places) if place.name not in self._whole_names]
        if not cut:
            return whole
        n = [count_padded(places[i].param.shape, self._run.rank.size) for i in cut]
        row = torch.cat([pad(whole[i].view(-1), (0, most - own[i].numel())) for i, most in zip(cut, n, strict=True)])
        rows = await self._run.rank.all_gather(row, name)
        for i, part in zip(cut, rows.split(n, dim=1), strict=True):
            shape = places[i].param.shape
            whole[i] = part.reshape(-1)[: shape.numel()].view(shape).contiguous()
        return whole

    # -- in a step --

    def _before_forward(self, number: int, unit: nn.Module, inputs: Any) -> None:
        """Notes the whole parameters of a unit, which torch makes once.

        A step's first forward also forgets which parameters the rank had used for the last update.
        """
        if unit is self.module:  # before this rank takes part in sums of the step
            self._listener.used.intersection_update([n for n, p in self._shards.items() if p.grad is not None])
            self._listener.settle_frozen(self._shards)
        for name in [name for name in self._units[number] if name not in self._listener.made]:
            self._listener.made[name] = self.module.get_parameter(name)

    def begin_backward(self) -> None:
        self._listener.attach_hooks(self._shards)

    def end_backward(self) -> None:
        """Ends a backward: all ranks have summed all gradients, and nothing is whole any more."""
        self._rounds.end()
        self._run.layout.note_unused(self._shards.keys() - self._listener.used)
        self._average_whole()
        self._listener.settle_frozen(self._shards)
        self._run.memory_account.note_held(self._peak)
        self._run.memory_account.note_held(self._kept)

    def drop_unused(self) -> None:
        """Makes the optimizer leave out parameters that no rank used."""
        for name in self._run.layout.unused:
            give_gradient(self._shards[name], None)

    def _average_whole(self) -> None:
        if not self._whole_names:
            return
        if not self._listener.used.issuperset(self._whole_names):
            self._run.host.usage.raise_hand(self._run.rank.step)
        for name in self._whole_names:
            p = self._shards[name]
            grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            self._run.host.drive_coroutine(_await_op(self._run.rank.all_reduce(grad.view(-1), "mean", f"whole {name}")))
            give_gradient(p, grad)

    def clip_gradients(self, longest: float) -> float:
        """Returns the norm of the summed gradients, and scales them to `longest` if the norm is above it."""
        grads = [_read_local(p.grad) for p in self._shards.values() if p.grad is not None]
        once = self._run.rank.id == 0  # counts once the parameters that all ranks keep whole
        mine = [as_real(_read_local(p.grad)) for p in self._shards.values()
                if p.grad is not None and (once or isinstance(p, DTensor))]  # fmt: skip
        squares = sum((g.double().square().sum() for g in mine), torch.zeros(1, dtype=torch.float64))
        self._run.host.drive_coroutine(_await_op(self._run.rank.all_reduce(squares, "sum", "norm")))
        norm = float(squares.sqrt())
        if (factor := longest / (norm + 1e-6)) < 1.0:
            torch._foreach_mul_(grads, factor)
        return norm

    # -- what the memory account counts --

    def gradients(self) -> int:
        return sum(_read_local(p.grad).nbytes for p in self._shards.values() if p.grad is not None)

    @contextmanager
    def measure_backward(self, alive: Callable[[], int]) -> Iterator[Callable[[], int]]:
        self.most, self.alive = 0, alive
        yield lambda: self.most

    def list_whole(self) -> list[Tensor]:
        """Returns the copy's trained parameters that are whole now."""
        beside = self._frozen.union(self._shards[name] for name in self._whole_names)
        return [p for p in self.module.parameters() if not isinstance(p, DTensor) and p not in beside]

    # -- what crosses --

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Gathers the parameters of one unit. x: (n,), this rank's shard. out: (p n,), for p ranks."""
        if self._run.memory_account.due:
            beside = sum(p.untyped_storage().nbytes() for p in self.list_whole())
            self._peak = max(self._peak, self._kept + beside + out.nbytes)
        out, x = as_real(out).view(-1), as_real(x).view(-1)
        if self._lane is None:
            return self._wire.wait(self._wire.all_gather(out, x))
        out.copy_(self._send_on_lane(Op("all_gather", x, "params"), "params").view(-1))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Any, unit: int) -> None:
        """Gradients of one unit become this rank's shard of their sum, or mean; `x` is (p n,).

        A rank that did not use one of the unit's parameters raises a hand before it sends.
        """
        if not self._listener.used.issuperset(self._units[unit]):
            self._run.host.usage.raise_hand(self._run.rank.step)
        if self._run.memory_account.due:
            self.most = max(self.most, self.gradients() + x.nbytes + out.nbytes + self.alive())
        out, x = as_real(out).view(-1), as_real(x).view(-1)
        if self._rounds.needed:
            x.div_(self._run.rank.size)
        if self._lane is None:
            options = dist.ReduceScatterOptions()
            options.reduceOp = op
            return self._wire.wait(self._wire.lend_group()._reduce_scatter_base(out, x, options))
        out.copy_(self._send_on_lane(Op("reduce_scatter", x, "gradients"), "gradients"))
        if op == dist.ReduceOp.AVG:
            out.div_(self._run.rank.size)

    def run_round(self, unit: int, is_sum: bool, numel: int, perform: Callable[[], None]) -> None:
        self._rounds.run_round(unit, is_sum, numel, perform)

    def _pad(self, unit: int) -> list[int]:
        """Returns the elements of each shard of a unit, with torch's padding."""
        return [count_padded(self._shards[name].shape, self._run.rank.size) for name in self._units[unit]]

    def _serve_unit(self, unit: int, is_sum: bool, numel: int) -> None:
        """Takes part in a gather or sum of a unit that other ranks compute now. numel: elements of this rank's input"""
        size, names, n = self._run.rank.size, self._units[unit], self._pad(unit)
        shards = [_read_local(self._shards[name]) for name in names]
        if not is_sum:
            x = torch.cat([pad(x.reshape(-1), (0, most - x.numel())) for x, most in zip(shards, n, strict=True)])
            return self.all_gather(x.new_empty(size * x.numel()), x)
        out = shards[0].new_empty(sum(n))
        self.reduce_scatter(out, out.new_zeros(size * sum(n)), dist.ReduceOp.SUM, unit)
        for name, part in zip(names, out.split(n), strict=True):
            self._add_gradient(self._shards[name], part)

    def _add_gradient(self, shard: Any, part: Tensor) -> None:
        """Adds this rank's part of a sum to a shard's gradient. part: flat, with torch's padding"""
        mine = part[: _read_local(shard).numel()].view(_read_local(shard).shape)
        if shard.grad is None:
            give_gradient(shard, DTensor.from_local(mine.clone(), self._mesh, [Shard(0)], run_check=False,
                                                    shape=shard.shape, stride=shard.stride()))  # fmt: skip
        else:
            _read_local(shard.grad).add_(mine)

    def _send_on_lane(self, op: Op, name: str) -> Tensor:
        assert self._lane is not None
        value: Tensor = self._lane.wait(self._lane.start(_await_op(op), name))
        return value


class _UnitBuffers:
    def __init__(self, of: FullySharded, unit: int) -> None:
        self._of, self._unit = of, unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _UnitGather(_UnitBuffers):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        gather = partial(self._of.all_gather, output_tensor, input_tensor)
        self._of.run_round(self._unit, False, input_tensor.numel(), gather)


class _UnitReduce(_UnitBuffers):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any,
                 async_op: bool = False) -> None:  # fmt: skip
        add = partial(self._of.reduce_scatter, output_tensor, input_tensor, op, self._unit)
        self._of.run_round(self._unit, True, input_tensor.numel(), add)


def _make_mesh(wire: Wire, name: Any) -> DeviceMesh:
    """Returns a mesh of all ranks in one dimension. See [Note: A mesh without a name service]."""
    mesh = DeviceMesh("cpu", list(range(wire.size)), _init_backend=False, _rank=wire.rank)
    mesh._dim_group_names, mesh._thread_id = [name], wire.rank
    _register_process_group(name, wire.lend_group())
    return mesh


def count_padded(shape: Sequence[int], size: int) -> int:
    """Returns the elements of one rank's rows of a parameter, with the padding of the last rank."""
    return -(-shape[0] // size) * prod(shape[1:])


def _refuse_read(params: list[Any], others: list[Any]) -> None:
    raise StrategyError(
        f"a parameter of shape {tuple(params[0].shape)} is read while torch's fully_shard keeps parameters in "
        f"shards: read it through the model that the loss receives, or take ZeRO3"
    )


def _is_whole(x: Any, place: ParameterPlace) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape == place.param.shape


def _read_local(x: Any) -> Tensor:
    with torch.no_grad():
        mine: Tensor = x.to_local() if isinstance(x, DTensor) else x.detach()
    return mine


async def _await_op(op: Op) -> Any:
    return await op
