"""Trains a copy of the model with torch's own `fully_shard`, as a baseline.

[Note: Two models] `fully_shard` changes a model in place and cannot be undone, so a copy of the model trains. The run's
own model then has no values of trained parameters, and reading one raises StrategyError. All ranks `fetch` the copy's
values together before an evaluation, a switch and the end. Both models share buffers and frozen parameters. The copy
has an optimizer of its own, over torch's DTensors. The run's optimizer has no state during this time.

[Note: Gradients of unused parameters] torch sums a gradient of zeros for a parameter that this rank did not use,
because every rank has to send the same bytes. So the rank listens to the gradients itself. All ranks then agree on the
parameters that no rank used (`host/sharding/usage.py`), and these lose their gradient before the update, as under DDP.

[Note: A mesh without a name service] fully_shard takes a DeviceMesh, which wants torch's default process group, one per
process; where ranks are threads there are several. So the mesh is made without a backend, and its group is entered
into torch's table of groups under a name of its own until `end`. That is the one thing here that is private to torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from workbench.engine.baselines.units import SameUnit, units
from workbench.engine.wire.collectives import Wire
from workbench.engine.wire.lane import Lane
from workbench.host.placement import absent
from workbench.host.placement.layout import Place
from workbench.rank import Op, StrategyError
from workbench.tasks import at_rate, rate, same_groups

if TYPE_CHECKING:
    from workbench.engine.rank.changes import Turnable


class FullySharded:
    """The copy that trains, from `enter_opaque` to `leave_opaque`. See [Note: Two models].

    module:    the copy; forward calls it
    optimizer: the optimizer of its shards
    alive:     returns the bytes of live activations, if the ledger measures this backward
    """

    def __init__(self, run: Turnable, wire: Wire, lane: Lane | None) -> None:
        self._run, self._wire, self._lane, self._own = run, wire, lane, run.optimizer
        model: nn.Module = run.model
        layout = run.layout
        names = {place.name for place in layout.order}
        trained = {id(p): nn.Parameter(p.data) for n, p in model.named_parameters() if n in names}
        others = {id(x): x for x in (*model.buffers(), *model.parameters()) if id(x) not in trained}
        self.module = copy.deepcopy(model, {**trained, **others})
        self._frozen = {p for p in self.module.parameters() if not p.requires_grad}
        self._name: Any = f"fully_shard {id(self)}"
        self._mesh = _mesh(wire, self._name)
        self.same = SameUnit(run, self.module)
        self._used: set[str] = set()  # names of the parameters that this rank has used since the last update
        self._listened: set[str] = set()  # names of those whose gradients this rank listens to
        prefixes = {id(module): name for name, module in self.module.named_modules()}
        for unit in [*units(self.module, run.experiment.bucket_mb), self.module]:
            number, prefix = self.same.number(unit), prefixes[id(unit)]
            own = {n for n, p in unit.named_parameters(prefix) if n in names and not isinstance(p, DTensor)}
            sharded: Any = fully_shard(unit, mesh=self._mesh, ignored_params=self._frozen)
            sharded.set_custom_all_gather(_Gather(self, number))
            sharded.set_custom_reduce_scatter(_Reduce(self, number, own))
            unit.register_forward_pre_hook(partial(self._listen, prefix, own))  # runs after torch made the unit whole
        if said := getattr(self.module, "set_reduce_scatter_unused_params", None):  # not in every torch
            said(True)  # a parameter that this rank's examples do not use has a gradient on other ranks
        self._shards = {n: p for n, p in same_groups(self.module, model).named_parameters() if n in names}
        self.optimizer = run.make_optimizer(run.experiment, [self._shards[n] for n in self._names(model)])
        if rate(self.optimizer) != run.rank.lr:
            at_rate(self.optimizer, run.rank.lr)
        for place in layout.order:
            self._hand_in(place)
        self.alive: Callable[[], int] = int
        self.most = 0  # bytes: the peak of gradients plus activations in a measured backward
        self._peak = self._kept = sum(_local(p).nbytes for p in self._shards.values())
        run.use_optimizer(self.optimizer)
        self.let_go()

    def _names(self, model: nn.Module) -> list[str]:
        return [n for n, _ in model.named_parameters() if n in self._shards]

    # -- between the run's own and the copy --

    def _hand_in(self, place: Place) -> None:
        """Moves this rank's rows of a parameter's optimizer state to the copy's optimizer."""
        here, shard = self._own.state.pop(place.param, {}), self._shards[place.name]
        given = {slot: self._cut(x) if _whole(x, place) else x for slot, x in here.items()}
        if given:
            self.optimizer.state[shard] = given

    def _cut(self, x: Tensor) -> DTensor:
        rows = -(-len(x) // self._run.rank.size)
        mine = x[rows * self._run.rank.id :][:rows].clone()
        made: DTensor = DTensor.from_local(mine, self._mesh, [Shard(0)], run_check=False, shape=x.shape,
                                           stride=x.stride())  # fmt: skip
        return made

    def let_go(self) -> None:
        """Frees the values of the trained parameters in the run's own model."""
        layout = self._run.layout
        for bucket in layout.params():
            layout.hold(type(bucket)(bucket.index, bucket.data[:0], (), bucket.offset))
            for place in layout.groups[bucket.index]:
                absent.leave(place.param, _refuse)
        self._run.ledger.hold(self._kept)

    async def fetch(self) -> None:
        """Copies the trained values into the run's own model. All ranks call it together."""
        layout, ledger = self._run.layout, self._run.ledger
        for bucket in layout.params():
            places = layout.groups[bucket.index]
            own = [_local(self._shards[place.name]) for place in places]
            values = await self._gathered(places, own, f"params {bucket.index}")
            layout.hold(bucket.like(torch.cat([x.reshape(-1) for x in values])))
            for place in places:
                absent.come(place.param)
        ledger.hold(self._kept + layout.held)

    async def give_back(self) -> None:
        """Copies trained values and optimizer state back to the run. All ranks call it together."""
        run = self._run
        await self.fetch()
        for index, places in enumerate(run.layout.groups):
            states = [self.optimizer.state.get(self._shards[place.name], {}) for place in places]
            for slot in sorted({name for state in states for name in state}):
                cut = [(p, s[slot]) for p, s in zip(places, states, strict=True) if isinstance(s.get(slot), DTensor)]
                own = [x.to_local() for _, x in cut]
                whole = await self._gathered([p for p, _ in cut], own, f"{slot} {index}")
                for (place, _), x in zip(cut, whole, strict=True):
                    self._own.state[place.param][slot] = x
            for place, state in zip(places, states, strict=True):
                self._own.state[place.param].update({n: x for n, x in state.items() if not isinstance(x, DTensor)})
                if not state:
                    del self._own.state[place.param]
        for mine, its in zip(self._own.param_groups, self.optimizer.param_groups, strict=True):
            mine.update({name: x for name, x in its.items() if name != "params"})
        run.use_optimizer(self._own)
        run.ledger.hold(run.layout.held)

    def end(self) -> None:
        """Removes the group from torch's table, after the last step of the copy."""
        _unregister_process_group(self._name)

    async def _gathered(self, places: list[Place], own: list[Tensor], name: str) -> list[Tensor]:
        """Gathers whole tensors from each rank's rows. With p ranks, it sends (p-1)/p of their bytes."""
        if not own:
            return []
        size = self._run.rank.size
        n = [-(-len(place.param) // size) * (place.numel // max(1, len(place.param))) for place in places]
        row = torch.cat([pad(x.detach().reshape(-1), (0, most - x.numel())) for x, most in zip(own, n, strict=True)])
        rows = await self._run.rank.all_gather(row, name)
        parts = rows.split(n, dim=1)
        return [part.reshape(-1)[: place.numel].view(place.param.shape).contiguous()
                for part, place in zip(parts, places, strict=True)]  # fmt: skip

    # -- in a step --

    def _listen(self, prefix: str, own: set[str], unit: nn.Module, inputs: Any) -> None:
        """Puts hooks on the whole parameters of `unit`, which torch makes once.

        See [Note: Gradients of unused parameters].
        """
        if own <= self._listened:
            return
        for name, p in unit.named_parameters(prefix):
            if name in own - self._listened and p.requires_grad and not isinstance(p, DTensor):
                note = self._used.add  # and not this object, which torch would keep alive
                p.register_post_accumulate_grad_hook(lambda _, note=note, name=name: note(name))
                self._listened.add(name)

    def begin(self) -> None:
        """Before a backward: forgets which parameters were used for gradients that are gone."""
        self._used -= {name for name in self._used if self._shards[name].grad is None}

    def passed(self) -> None:
        """A backward is over: nothing is whole any more."""
        self._run.layout.unused = self._shards.keys() - self._used
        self._run.ledger.hold(self._peak)
        self._run.ledger.hold(self._kept)

    def drop_unused(self) -> None:
        """Before an update: a parameter that no rank used has no gradient, so the optimizer leaves it alone."""
        for name in self._run.layout.unused:
            self._shards[name].grad = None

    def shorten(self, longest: float) -> float:
        """Returns the norm of the summed gradients, and scales them to `longest` if the norm is above it."""
        grads = [_local(p.grad) for p in self._shards.values() if p.grad is not None]
        squares = torch.stack([g.double().square().sum() for g in grads]).sum().view(1)
        self._run.host.drive(_asked(self._run.rank.all_reduce(squares, "sum", "norm")))
        norm = float(squares.sqrt())
        if (factor := longest / (norm + 1e-6)) < 1.0:
            torch._foreach_mul_(grads, factor)
        return norm

    # -- what the ledger counts --

    def gradients(self) -> int:
        """Returns the bytes of the sharded gradients that exist now."""
        return sum(_local(p.grad).nbytes for p in self._shards.values() if p.grad is not None)

    @contextmanager
    def looked(self, alive: Callable[[], int]) -> Iterator[Callable[[], int]]:
        """A context for a measured backward. Yields a function that returns `most`."""
        self.most, self.alive = 0, alive
        yield lambda: self.most

    def whole(self) -> list[Tensor]:
        """Returns the copy's trained parameters that are whole now."""
        frozen = self._frozen
        return [p for p in self.module.parameters() if not isinstance(p, DTensor) and p not in frozen]

    # -- what crosses --

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Gathers the parameters of one unit. x: (n,), this rank's shard. out: (p n,), for p ranks."""
        if self._run.ledger.due:
            beside = sum(p.untyped_storage().nbytes() for p in self.whole())
            self._peak = max(self._peak, self._kept + beside + out.nbytes)
        if self._lane is None:
            return self._wire.wait(self._wire.all_gather(out, x))
        out.copy_(self._over_the_link(Op("all_gather", x, "params"), "params").view(-1))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Any, names: set[str]) -> None:
        """Gradients of one unit become this rank's shard of their sum, or mean; `x` is (p n,).

        names: the unit's parameters; a rank that did not use one of them says so before it sends
        """
        if not names <= self._used:
            self._run.host.usage.raise_hand(self._run.rank.step)
        if self._run.ledger.due:
            self.most = max(self.most, self.gradients() + x.nbytes + out.nbytes + self.alive())
        if self._lane is None:
            options = dist.ReduceScatterOptions()
            options.reduceOp = op
            return self._wire.wait(self._wire.lend()._reduce_scatter_base(out, x, options))
        out.copy_(self._over_the_link(Op("reduce_scatter", x, "gradients"), "gradients"))
        if op == dist.ReduceOp.AVG:
            out.div_(self._run.rank.size)

    def _over_the_link(self, op: Op, name: str) -> Tensor:
        assert self._lane is not None
        value: Tensor = self._lane.wait(self._lane.start(_asked(op), name))
        return value


class _Room:
    """Allocates torch's buffers for the communication of one unit."""

    def __init__(self, of: FullySharded, unit: int) -> None:
        self._of, self._unit = of, unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Room):
    """The all-gather of one unit, for `set_custom_all_gather`."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._of.same(self._unit, "gathers")
        self._of.all_gather(output_tensor, input_tensor)


class _Reduce(_Room):
    """What `set_custom_reduce_scatter` takes. names: the unit's parameters."""

    def __init__(self, of: FullySharded, unit: int, names: set[str]) -> None:
        super().__init__(of, unit)
        self._names = names

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any,
                 async_op: bool = False) -> None:  # fmt: skip
        self._of.same(self._unit, "sums")
        self._of.reduce_scatter(output_tensor, input_tensor, op, self._names)


def _mesh(wire: Wire, name: Any) -> DeviceMesh:
    """Returns a mesh of all ranks in one dimension. See [Note: A mesh without a name service]."""
    mesh = DeviceMesh("cpu", list(range(wire.size)), _init_backend=False, _rank=wire.rank)
    mesh._dim_group_names, mesh._thread_id = [name], wire.rank
    _register_process_group(name, wire.lend())
    return mesh


def _refuse(params: list[Any], others: list[Any]) -> None:
    raise StrategyError(
        f"a parameter of shape {tuple(params[0].shape)} is read while torch's fully_shard holds all of them in shards "
        f"of its own: read it through the model that the loss is given, or take ZeRO3"
    )


def _whole(x: Any, place: Place) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape == place.param.shape


def _local(x: Any) -> Tensor:
    with torch.no_grad():
        mine: Tensor = x.to_local()
    return mine


async def _asked(op: Op) -> Any:
    return await op
