"""Cuts a model's matrices over the ranks that compute together, by a plan of module names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import nn

from workbench.host.placement.sliced_parameter import whole_numel, whole_shape
from workbench.settings import KnobError
from workbench.tasks import Colwise, Learner, Partial, Plan, Rowwise, Scatter, Sequence, TaskError, Way, way_of

ELEMENTWISE = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Dropout,
)


@dataclass(frozen=True)
class SlicedParameter:
    """A parameter cut along dimension `dim` of the shape `view`, which is `axis` of its own shape."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    dim: int
    axis: int

    def shape_of_slice(self, ways: int) -> tuple[int, ...]:
        return tuple(n // ways if k == self.axis else n for k, n in enumerate(self.shape))


@dataclass(frozen=True, eq=False)
class TensorSplit:
    """A model's matrices in `ways` equal slices. A whole parameter is on every rank, and one rank owns it.

    sliced:  the cut parameters by name
    owners:  by a whole parameter's name, the rank that keeps its state
    share:   one rank's share of the compute, estimated from numbers of parameters
    partial: whole parameters that see only a rank's own heads or sequence positions
    """

    ways: int
    modules: tuple[tuple[str, Way], ...]
    sliced: Mapping[str, SlicedParameter]
    owners: Mapping[str, int]
    share: float
    partial: frozenset[str] = frozenset()

    @property
    def splits_sequences(self) -> bool:
        return any(isinstance(way, Scatter) for _, way in self.modules)

    @cached_property
    def names(self) -> tuple[frozenset[str], ...]:
        """By rank, the parameters that it trains: slices and own whole ones."""
        return tuple(
            frozenset(self.sliced) | {name for name, rank in self.owners.items() if rank == k} for k in range(self.ways)
        )

    def shape_of_part(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.sliced[name].shape_of_slice(self.ways) if name in self.sliced else shape


def split_model(ways: int, model: nn.Module, learner: Learner, sequence: bool = False) -> TensorSplit:
    """Cuts `model`, whole or already in slices. Raises KnobError if that is impossible.

    sequence: whether each rank has its own sequence positions between two layers
    """
    every = dict(match_plan(model, _find_plan(model, learner)))
    if sequence and not any(isinstance(way, Scatter) for way in every.values()):
        raise KnobError(
            "sequence=true: the plan has no layer that splits positions first; use Scatter() for the first block, "
            "Sequence() for norms and Colwise(gather=True) for the last layer, or take sequence=false"
        )
    plan = every if sequence else {n: w for n, w in every.items() if not isinstance(w, Scatter | Sequence)}
    modules, trained = dict(model.named_modules()), {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = {id(p): name for name, p in model.named_parameters()}
    sliced: dict[str, SlicedParameter] = {}
    _require_even(modules, plan, ways)
    for name, way in plan.items():
        for kind, made in _list_sliced(name, modules[name], way, ways):
            full = names.get(id(getattr(modules[name], kind)), "")
            if not full:
                raise _make_refusal(
                    f"{name} computes its {kind} from other parameters (weight_norm, spectral_norm, pruning); remove "
                    f"it from the plan, or remove that transform"
                )
            if full not in trained:
                raise _make_refusal(
                    f"parameter {full} is frozen, and a plan splits trainable parameters only; remove {name} from "
                    f"the plan, or unfreeze the parameter"
                )
            if sliced.setdefault(full, made) != made:
                raise _make_refusal(
                    f"parameter {full} is tied, and {name} would split it along another dimension than the other "
                    f"module that has it; split both along the same dimension"
                )
    _require_alone(model, plan, sliced)
    whole = {name: whole_numel(p) for name, p in trained.items() if name not in sliced}
    partial = {names[id(p)] for name, way in plan.items() for p in _list_partial(modules[name], way, sequence)}
    share = _compute_share(model, sliced, ways)
    return TensorSplit(
        ways, tuple(plan.items()), sliced, _assign_owners(whole, ways), share, frozenset(partial & whole.keys())
    )


def _find_plan(model: nn.Module, learner: Learner) -> Plan:
    if learner.split is not None:
        try:
            return learner.split(model)
        except TaskError as error:
            raise _make_refusal(str(error)) from error
    if isinstance(own := getattr(model, "_tp_plan", None), Mapping) and own:
        return own
    if isinstance(model, nn.Sequential) and (pairs := _pair_linears(model)):
        return pairs
    what = "a Sequential without two Linears in a row" if isinstance(model, nn.Sequential) else type(model).__name__
    raise _make_refusal(
        f"no plan says how to split {what} over ranks; give the task `split`: model -> "
        f'{{"blocks.*.up": Colwise(), "blocks.*.down": Rowwise()}}, or take another partition'
    )


def _pair_linears(model: nn.Sequential) -> dict[str, Way]:
    layers = [(name, module) for name, module in list_leaves(model) if not isinstance(module, ELEMENTWISE)]
    found: dict[str, Way] = {}
    for (one, first), (other, second) in pairwise(layers):
        if one not in found and type(first) is type(second) is nn.Linear and first is not second:
            found |= {one: Colwise(), other: Rowwise()}
    return found


def list_leaves(model: nn.Sequential, before: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers of nested Sequentials."""
    for name, module in model.named_children():
        if isinstance(module, nn.Sequential):
            yield from list_leaves(module, f"{before}{name}.")
        else:
            yield f"{before}{name}", module


def match_plan(model: nn.Module, plan: Plan, whose: str = "partition=Tensor") -> Iterator[tuple[str, Way]]:
    """Yields each planned module's cut. Raises KnobError if a pattern matches none."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern, said in plan.items():
        way = way_of(said)
        if way is None:
            raise _make_refusal(
                f"the plan has {said!r} for {pattern}; use Colwise() or Rowwise(), or remove it to keep the layer "
                f"whole",
                whose,
            )
        like = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        if not (fits := [name for name in names if like.fullmatch(name)]):
            raise _make_refusal(
                f"the plan names {pattern}, and the model has no such module; it has "
                f"{', '.join(names[:6])}{' ...' if len(names) > 6 else ''}",
                whose,
            )
        for name in fits:
            yield name, way


def _list_sliced(name: str, module: nn.Module, way: Way, ways: int) -> Iterator[tuple[str, SlicedParameter]]:
    if isinstance(way, Sequence) and (odd := [m for m in module.modules() if hasattr(m, "running_mean")]):
        raise _make_refusal(
            f"{name}: a {type(odd[0]).__name__} needs the statistics of a whole batch, and a rank has only some "
            f"positions; use a LayerNorm, or sequence=false"
        )
    if isinstance(way, Scatter | Sequence | Partial):
        return
    if type(module) is nn.Embedding and isinstance(way, Rowwise):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise _make_refusal(
                f"{name}: the rows of an Embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be "
                f"split; remove it from the plan"
            )
        rows, width = whole_shape(module.weight)
        _require_divisible(name, "rows", rows, 1, ways)
        yield "weight", SlicedParameter((rows, width), (rows, width), 0, 0)
        return
    if type(module) is not nn.Linear:
        kinds = "Rowwise splits Linear or Embedding" if isinstance(way, Rowwise) else "Colwise splits Linear"
        raise _make_refusal(f"{name} is of class {type(module).__name__}, and {kinds}; remove it from the plan")
    out, into = whole_shape(module.weight)
    if not isinstance(way, Colwise):
        _require_divisible(name, "inputs", into, 1, ways)
        yield "weight", SlicedParameter((out, into), (out, into), 1, 1)
        return
    if out % way.packed:
        raise _make_refusal(
            f"{name} has {out} outputs, which do not make {way.packed} matrices of one size; set `packed` to a "
            f"divisor of the outputs"
        )
    _require_divisible(name, "outputs", out // way.packed, way.together, ways)
    each = (way.packed, out // way.packed) if way.packed > 1 else (out,)
    yield "weight", SlicedParameter((out, into), (*each, into), len(each) - 1, 0)
    if module.bias is not None:
        yield "bias", SlicedParameter((out,), each, len(each) - 1, 0)


def _list_partial(module: nn.Module, way: Way, sequence: bool) -> Iterator[nn.Parameter]:
    if isinstance(way, Sequence | Partial):
        yield from module.parameters()
    elif sequence and isinstance(way, Rowwise) and isinstance(module, nn.Linear) and module.bias is not None:
        yield module.bias


def _require_divisible(name: str, what: str, count: int, together: int, ways: int) -> None:
    units = count // together
    if count % together == 0 and units % ways == 0:
        return
    some = f", in groups of {together} that stay together" if together > 1 else ""
    raise UnevenSplitError(
        f"ways={ways}: {name} has {count} {what}{some}, which cannot be split evenly over the ranks", units
    )


class UnevenSplitError(KnobError):
    """Raised if the units (rows, heads) of a module cannot be cut evenly."""

    def __init__(self, said: str, units: int) -> None:
        super().__init__(said)
        self.units = units


def _require_even(modules: Mapping[str, nn.Module], plan: Mapping[str, Way], ways: int) -> None:
    """Raises KnobError if `ways` does not fit, and proposes numbers that fit every module."""

    def uneven(n: int) -> list[UnevenSplitError]:
        found = []
        for name, way in plan.items():
            try:
                list(_list_sliced(name, modules[name], way, n))
            except UnevenSplitError as error:
                found.append(error)
        return found

    if lines := uneven(ways):
        least = min(line.units for line in lines)
        fits = [n for n in range(2, least + 1) if least % n == 0 and not uneven(n)]
        would = f"take ways={' or '.join(map(str, fits[:4]))}" if fits else "remove it from the plan"
        raise KnobError(f"{lines[0]}; {would}")


def _require_alone(model: nn.Module, plan: Mapping[str, Way], sliced: Mapping[str, SlicedParameter]) -> None:
    """Raises KnobError if a sliced parameter is tied to a module that needs it whole."""
    named, cut = dict(model.named_parameters()), {id(p) for n, p in model.named_parameters() if n in sliced}
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and id(p) in cut]
        if own and name not in plan:
            tied = next(n for n, p in named.items() if p is own[0])
            raise _make_refusal(
                f"parameter {tied} is tied, and {name or 'the model'} needs it whole; split both along the same "
                f"dimension, or neither"
            )


def _make_refusal(reason: str, whose: str = "partition=Tensor") -> KnobError:
    return KnobError(f"{whose}: {reason}")


def _assign_owners(whole: Mapping[str, int], ways: int) -> dict[str, int]:
    load = [0] * ways
    found: dict[str, int] = {}
    for name, numel in sorted(whole.items(), key=lambda one: -one[1]):
        rank = load.index(min(load))
        found[name], load[rank] = rank, load[rank] + numel
    return found


def _compute_share(model: nn.Module, sliced: Mapping[str, SlicedParameter], ways: int) -> float:
    """Leaves out embedding tables."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    counts = {n: whole_numel(p) for n, p in model.named_parameters() if id(p) not in looked_up}
    total = sum(counts.values())
    cut = sum(numel for name, numel in counts.items() if name in sliced)
    return (total - cut + cut / ways) / total if total else 1.0
