"""Times each part of a model, in one process."""

from __future__ import annotations

import copy
import time
from statistics import median
from typing import NamedTuple

import torch

from workbench.experiment import Experiment
from workbench.host.core.valueless import make_outline
from workbench.host.memory.batches import make_example, move_to_device
from workbench.host.passes.stage_module import cut_batch
from workbench.host.passes.tensor_schedule import PiecePasses
from workbench.host.placement.stage_cuts import StageCuts, list_parts
from workbench.settings import KnobError
from workbench.settings.describe_error import text_of
from workbench.tasks import Learner

WARMUP_PASSES = 3


class TimedUnit(NamedTuple):
    """A part between two possible cuts, and its seconds per micro-batch.

    The first part includes the work before the model's call, and the last part the loss.
    """

    name: str
    forward: float
    backward: float


def measure_unit_times(e: Experiment, learner: Learner, rounds: int) -> tuple[TimedUnit, ...]:
    """Returns median times over `rounds` passes of one micro-batch on one thread, after WARMUP_PASSES.

    Raises KnobError if the task defines no parts, or if an output cannot cross between ranks.
    """
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    try:
        torch.set_num_threads(1)
        torch.manual_seed(e.seed)
        model = copy.deepcopy(learner.model()).train()  # the task may have only one
        parts = list_parts(model, learner)
        batch = cut_batch(make_example(learner, e, "cpu"), e.partition.micro_batches)[0]
        each = StageCuts(1, tuple((part,) for part in parts), (), ())
        took: list[tuple[list[float], list[float]]] = [([], []) for _ in parts]
        for number in range(WARMUP_PASSES + rounds):
            model.zero_grad(set_to_none=number == 0)
            with torch.enable_grad():
                passed = _time_passes(PiecePasses(model, learner, each, batch))
            for kept, pair in zip(took, passed if number >= WARMUP_PASSES else (), strict=number >= WARMUP_PASSES):
                for one, seconds in zip(kept, pair, strict=True):
                    one.append(seconds)
    except KnobError:
        raise
    except Exception as error:
        raise KnobError(
            f"partition={type(e.partition).__name__}: the model's parts cannot be timed one by one, because one "
            f"fails: {text_of(error)}; pass the times (`times=`), or give the task other `parts`"
        ) from error
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    return tuple(TimedUnit(names.get(id(part)) or type(part).__name__, median(there), median(back))
                 for part, (there, back) in zip(parts, took, strict=True))  # fmt: skip


def measure_outputs(e: Experiment, learner: Learner) -> tuple[int, ...]:
    """Returns the bytes of each part's output for one micro-batch, except the last part's.

    Computes no values. Raises KnobError if the parts do not run on the meta device.
    """
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            model = make_outline(learner)
            parts = list_parts(model, learner)
            batch = cut_batch(move_to_device(make_example(learner, e, "cpu"), "meta"), e.partition.micro_batches)[0]
            passes = PiecePasses(model, learner, StageCuts(len(parts), tuple((part,) for part in parts), (), ()), batch)
            return tuple(passes.run_forward(number) for number in range(len(parts) - 1))
    except Exception as error:
        raise KnobError(
            f"partition={type(e.partition).__name__}: the outputs of the model's parts are not known, because the "
            f"parts do not run on the meta device ({text_of(error)}); take a task whose model does"
        ) from error


def _time_passes(passes: PiecePasses) -> list[tuple[float, float]]:
    there, back = [0.0] * passes.count, [0.0] * passes.count
    for number in range(passes.count):
        began = time.perf_counter()
        passes.run_forward(number)
        there[number] = time.perf_counter() - began
    for number in reversed(range(passes.count)):
        began = time.perf_counter()
        passes.run_backward(number)
        back[number] = time.perf_counter() - began
    return list(zip(there, back, strict=True))
