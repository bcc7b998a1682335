"""Tests losses and gradients that are not finite, and diverging losses: who, where, and the policy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.piped import batches, deep, held_out, piped
from tests.ranks import batch, experiment, live, make_fitting, mse, net, run, shipped, toy, weights
from tests.sim.insides import simulated
from tests.waiting import until
from workbench import Change, simulate
from workbench.cluster.run.run_changes import Changes
from workbench.cluster.run.run_controller import RunController
from workbench.cluster.transport.row_encoding import RowBatch
from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.host.observe import non_finite
from workbench.host.observe.non_finite_origin import (
    find_in_backward,
    find_in_forward,
    find_in_gradients,
    find_in_parameters,
)
from workbench.partitions import Pipeline
from workbench.record.timeline import columns_of
from workbench.run import Run
from workbench.settings import KnobError
from workbench.strategies import DDP, KFAC, ByteScheduler, LocalSGD, Strategy, ZeRO1
from workbench.tasks import Colwise, Rowwise

NAN = float("nan")
BAD = 3  # the step whose batch is bad, on rank 1


def data(rank: int, ranks: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the toy's data, except that the first number of rank 1's batch `BAD` marks it."""
    drawn = [batch(rank, step, seed) for step in range(64)]
    if rank == 1:
        drawn[BAD][0][0, 0] = 1e3
    return drawn


def marked(x: Tensor) -> bool:
    return bool(x[0, 0] == 1e3)


class Breaks(nn.Module):
    """The toy's net with a middle layer that treats a marked batch by `how`."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.odd = Odd(how)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x.clamp(-5, 5)))))
        return self.c(self.odd(h) if marked(x) else h)


class Odd(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(64))

    def forward(self, h: Tensor) -> Tensor:
        return self.how(h * self.scale)


def forth(h: Tensor) -> Tensor:
    return h * NAN


def back(h: Tensor) -> Tensor:
    """The forward value is finite but the gradient is not: a square root's slope at 0."""
    return h + (h - h.detach()).abs().sqrt()


def breaking(how: Callable[[Tensor], Tensor]) -> Any:
    return toy(model=lambda: net(lambda: Breaks(how)), data=data, split=lambda _: {"a": Colwise(), "b": Rowwise()})


def noted(session: Any, name: str = "nan") -> list[tuple[int, dict[str, Any]]]:
    return [(m[0], json.loads(m[3])) for m in session.record.noted(name)]


# -- which layer --


@pytest.mark.parametrize(("how", "layer"), [(forth, "odd"), (lambda h: h / 0.0, "odd")])
def test_the_named_layer_is_the_first_in_forward_order_with_a_non_finite_output(how: Any, layer: str) -> None:
    model = net(lambda: Breaks(how))
    found = find_in_forward(model, mse, data(1, 2, 0)[BAD])
    assert (found.layer, found.why) == (layer, "the first in forward order whose output is not finite")
    assert find_in_forward(model, mse, data(1, 2, 0)[0]).why == "the same batch, computed again, gives a finite loss"


def test_arithmetic_between_layers_is_blamed_on_its_module_not_the_next_layer() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.then = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.then((self.first(x) * 0 - 1).log())

    model = nn.Sequential(nn.Linear(8, 8), Between())
    assert find_in_forward(model, mse, batch(0, 0, 0)).layer == "1"


def test_a_bad_batch_and_a_bad_loss_are_distinguished_from_a_layer() -> None:
    x, y = batch(0, 0, 0)
    assert find_in_forward(net(), mse, (x * NAN, y)).why == "the batch holds numbers that are not finite"
    given = find_in_forward(net(), lambda model, pair: mse(model, (pair[0] * NAN, pair[1])), (x, y))
    assert given == ("", "the input of the model is not finite")
    found = find_in_forward(net(), lambda model, pair: mse(model, pair) * NAN, (x, y))
    assert (found.layer, found.why[:37]) == ("", "the output of every layer is finite, ")


def test_the_named_layer_is_the_first_in_backward_order_with_a_non_finite_gradient() -> None:
    model = net(lambda: Breaks(back))
    found = find_in_backward(model, mse, data(1, 2, 0)[BAD])
    assert found is not None and found.layer == "odd"
    assert find_in_backward(model, mse, data(1, 2, 0)[0]) is None
    mse(model, data(1, 2, 0)[BAD]).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    spoiled = find_in_forward(model, mse, data(1, 2, 0)[0])
    assert spoiled.layer == "b", "a later step's forward does not call the odd layer, and b is next on the way back"
    assert find_in_forward(model, mse, data(1, 2, 0)[BAD]).layer == "odd" == find_in_parameters(model).layer
    assert find_in_gradients(model).layer == "odd" and find_in_parameters(net()).layer == ""


def test_the_search_for_the_layer_changes_nothing_and_never_raises() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))
    kept, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    pair = batch(0, 0, 0)
    find_in_forward(model, mse, (pair[0] * NAN, pair[1]))
    find_in_backward(model, mse, pair)
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def fails(model: nn.Module, pair: Any) -> Tensor:
        raise ValueError("once is enough")

    assert find_in_forward(model, fails, pair) == ("", "the batch cannot be computed again")
    assert find_in_backward(model, fails, pair) is None


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "first", "layer"), [(forth, (BAD, 1), "odd"), (back, (BAD + 1, None), "b")])
def test_ranks_pause_and_report_rank_layer_and_step(how: Any, first: Any, layer: str) -> None:
    sessions = live(experiment(2, 0, task=breaking(how)))
    until(lambda: all(s.phase == "paused" for s in sessions))
    step, detail = min((m for s in sessions for m in noted(s)), key=lambda m: m[0])
    assert (step, detail["layer"]) == (first[0], layer)
    assert first[1] is None or detail["rank"] == first[1]
    for s in sessions:
        s.abort()
        assert s.join(60)


# -- a step that is skipped --


def skipping(ranks: int = 2, steps: int = 8, task: Any = None, **rest: Any) -> Experiment:
    return experiment(ranks, steps, task=task or breaking(forth), on_nan="skip", pace=5.0, **rest)


def reference(left_out: int, steps: int = 8) -> Tensor:
    """Returns one process's weights on the joined batch of two ranks, without one step."""
    model = net(lambda: Breaks(forth))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(steps):
        if step == left_out:
            continue
        loss = (mse(model, batch(0, step, 0)) + mse(model, data(1, 2, 0)[step])) / 2
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])


@pytest.mark.ranks
@pytest.mark.parametrize("how", [forth, back])
def test_a_skipped_step_has_no_effect_and_its_rank_and_layer_are_reported(how: Any) -> None:
    sessions = run(skipping(task=breaking(how)))
    for s in sessions:
        assert torch.allclose(weights(s), reference(BAD), atol=1e-6)
        assert s.phase == "done"
    assert [(step, d["layer"], d["own"]) for step, d in noted(sessions[1])] == [(BAD, "odd", True)]
    assert [(step, d["own"]) for step, d in noted(sessions[0])] == [(BAD, False)], "it knows the sum alone"


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=3)])
def test_both_hosts_skip_the_same_steps(strategy: Strategy) -> None:
    e = skipping(strategy=strategy)
    real, virtual = run(e), simulate(e, real=True)
    for s in real:
        rows = virtual.timeline.samples.rows()
        mine = rows[(rows.rank == s.rank.id) & rows.equal("name", "loss")]
        assert torch.equal(torch.tensor(s.record.losses()).nan_to_num(-1), torch.tensor(mine.value).nan_to_num(-1))
        said = [(step, d) for step, _, d in virtual.details("nan") if d["rank"] == s.rank.id]
        assert said == noted(s)


def finite_but_for(e: Experiment) -> set[tuple[int, int]]:
    """Returns (step, rank) of the non-finite losses of a simulated run."""
    rows = simulate(e, real=True).timeline.samples.rows()
    rows = rows[rows.equal("name", "loss")]
    return {(int(s), int(r)) for s, r, v in zip(rows.step, rows.rank, rows.value, strict=True) if not math.isfinite(v)}


@pytest.mark.parametrize("name", shipped(Strategy))
def test_every_strategy_skips_a_bad_step_or_refuses_the_policy(name: str) -> None:
    strategy = make_fitting(shipped(Strategy)[name], 4)
    can = strategy.clips and strategy.skips and not strategy.shards and strategy.workers == 1
    if not can:
        with pytest.raises(KnobError, match=r"on_nan='skip': .*; use on_nan='stop' with it, or DDP or LocalSGD"):
            skipping(4, strategy=strategy)
        return
    e = skipping(4, 14, strategy=strategy)
    assert e.on_nan == "skip"
    bad = {} if strategy.opaque else finite_but_for(e)  # no simulator has torch's own exchange
    assert len({rank for _, rank in bad}) <= 1 and len(bad) <= 14 // 3, "a bad batch is only its own step's"
    assert bad or strategy.opaque or not strategy.trains(1, 4)


@pytest.mark.parametrize("name", shipped(Compressor))
def test_no_compressor_keeps_state_of_a_skipped_step(name: str) -> None:
    e = skipping(3, 9, compressor=shipped(Compressor)[name].usual())
    assert finite_but_for(e) == {(BAD, 1)}


def test_running_statistics_exclude_a_skipped_step() -> None:
    class Normed(Breaks):
        def __init__(self) -> None:
            super().__init__(forth)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(super().forward(x))

    _, sessions = simulated(skipping(task=toy(model=lambda: net(Normed), data=data)))
    assert all(bool(s.model.norm.running_mean.isfinite().all()) for s in sessions)


@pytest.mark.ranks
def test_the_stages_of_all_replicas_skip_a_step_together() -> None:
    def drawn(rank: int, ranks: int, seed: int) -> list[Any]:
        pairs = batches(rank, ranks, seed)
        if rank == 1:
            pairs[BAD][1][0, 0] = NAN  # the label of its replica
        return pairs

    task = toy(model=deep, data=drawn, evaluate=held_out, loss=mse)
    e = piped(4, 7, task=task, partition=Pipeline(), pace=5.0, on_nan="skip")
    assert {step for step, _ in finite_but_for(e)} == {BAD}
    sessions = run(e)
    assert all(bool(p.param.isfinite().all()) for s in sessions for p in s.layout.order)
    losses = [(step, v) for s in sessions for step, name, _, v in s.record.samples if name == "loss"]
    assert {step for step, v in losses if not math.isfinite(v)} == {BAD}


def test_finite_detects_any_nan_or_infinity() -> None:
    huge = torch.full((8,), 3e38)
    assert non_finite.is_finite([None, huge, torch.zeros(0), torch.ones(3, dtype=torch.float16) * 6e4])
    for bad in (NAN, math.inf, -math.inf):
        assert not non_finite.is_finite([torch.zeros(3), torch.tensor([0.0, bad])])
    assert not non_finite.is_finite([torch.tensor([math.inf, -math.inf])]) and non_finite.is_finite([])


def test_the_skip_policy_ends_after_too_many_skips_in_a_row() -> None:
    task = toy(loss=lambda model, pair: mse(model, pair) * NAN)
    found = simulate(skipping(task=task, steps=non_finite.MAX_SKIPPED + 5), real=True).details("nan")
    last = [(step, d) for step, _, d in found if not d.get("skipped")]
    assert last[0][0] == non_finite.MAX_SKIPPED and last[0][1]["row"] == non_finite.MAX_SKIPPED


@pytest.mark.parametrize(("strategy", "why"), [
    (ByteScheduler(), "under ByteScheduler an update does not see all gradients of a rank"),
    (ZeRO1(), "under ZeRO1 an update does not see all gradients of a rank"),
    (KFAC(), "KFAC stores state of a step's gradients before the update"),
])  # fmt: skip
def test_a_strategy_that_cannot_skip_raises_knob_error_with_the_reason(strategy: Strategy, why: str) -> None:
    with pytest.raises(KnobError, match=why):
        skipping(strategy=strategy)


# -- a diverging loss --


def losing(*values: float) -> Any:
    """A task whose loss at each step is a given value, for any model."""

    def drawn(rank: int, ranks: int, seed: int) -> list[Any]:
        return [(*batch(rank, step, seed), value) for step, value in enumerate(values)]

    def loss(model: nn.Module, triple: Any) -> Tensor:
        return mse(model, triple[:2]) * 0 + triple[2]

    return toy(data=drawn, loss=loss)


def ran_away(values: list[float], **rest: Any) -> list[tuple[int, dict[str, Any]]]:
    e = experiment(1, len(values), **{"task": losing(*values), "pace": 5.0, "diverged": 10.0, **rest})
    return [(step, d) for step, _, d in simulate(e, real=True).details("diverged")]


def test_a_loss_far_above_the_earlier_best_is_reported_once() -> None:
    values = [2.0 - 0.1 * n for n in range(10)] + [500.0, 900.0, 5e3]
    assert ran_away(values) == [(10, {"rank": 0, "loss": "500", "best": "1.55"})]
    assert ran_away(values, diverged=0.0) == [] and ran_away(values, diverged=1e4) == []


def test_a_tiny_loss_may_grow_many_times_without_a_report() -> None:
    values = [2.0, 1e-3, *[1e-8] * 20, *[1e-2] * 10, *[1.0] * 5]
    assert ran_away(values) == [], "below the first it has learned something"


@pytest.mark.ranks
def test_a_resumed_run_does_not_pause_again_for_the_same_loss() -> None:
    values = [2.0] * 5 + [500.0] * 4000
    (s,) = live(experiment(1, 0, task=losing(*values), diverged=10.0))
    until(lambda: s.phase == "paused")
    assert [step for step, _ in noted(s, "diverged")] == [5]
    s.request({"kind": "resume", "id": "go on"})
    until(lambda: s.rank.step > 40)
    assert s.phase == "running" and len(noted(s, "diverged")) == 1
    s.abort()
    assert s.join(60)


# -- policies --


@pytest.mark.parametrize(("policy", "steps"), [("auto", 8), ("pause", 8), ("stop", BAD + 1)])
def test_a_simulation_goes_on_unless_the_policy_is_stop(policy: str, steps: int) -> None:
    made = simulate(skipping().set("on_nan", policy), real=True)
    rows = made.timeline.spans.rows()
    assert int(rows[rows.equal("lane", "step")].step.max()) == steps - 1
    assert made.details("state")[-1][2]["state"] == ("stopped" if policy == "stop" else "done")


@pytest.mark.ranks
@pytest.mark.parametrize("changes", [(), (Change(2, "on_nan", "stop"),)])
def test_ranks_stop_by_policy_even_if_it_is_set_live(changes: Any) -> None:
    policy = "pause" if changes else "stop"
    sessions = live(experiment(2, 0, task=breaking(forth), on_nan=policy), changes)
    assert all(s.join(60) for s in sessions)
    assert [s.phase for s in sessions] == ["stopped"] * 2 and sessions[0].rank.step < 10


@pytest.mark.parametrize("bad", ["explode", "", None, 3])
def test_an_unknown_on_nan_policy_raises_knob_error(bad: Any) -> None:
    with pytest.raises(KnobError, match=r"on_nan=.*: must be one of auto, pause, stop, skip"):
        Experiment().set("on_nan", bad)


def following(policy: str = "auto", watched: bool = False, ranks: int = 2) -> RunController:
    e = Experiment(ranks=ranks, on_nan=policy)
    return RunController(Run({}, live=True), Any, Changes(e, []), "g", lambda: watched)  # type: ignore[arg-type]


def came(live: RunController, rank: int, step: int, t: float, name: str, **detail: Any) -> None:
    """Delivers a rank's next mark."""
    row = columns_of("marks", [(rank, step, name, t, json.dumps({"rank": rank, **detail}))])
    live.take_batch(RowBatch("g", "marks", rank, live.reorder_buffer.next_seq["marks", rank], row))


@pytest.mark.parametrize(("policy", "watched", "ends"), [
    ("auto", True, False), ("auto", False, True), ("pause", False, False), ("stop", True, True), ("skip", False, True),
])  # fmt: skip
def test_the_lab_pauses_or_ends_a_run_by_its_policy_and_watchers(policy: str, watched: bool, ends: bool) -> None:
    for name in ("nan", "diverged"):
        it = following(policy, watched)
        came(it, 1, 4, 2.0, name, loss="nan", layer="b", why="it is", best="2")
        assert (it.ending.is_stop_requested, it.ending.unwatched_error is not None) == (ends, ends)


def test_the_note_names_rank_layer_step_and_a_remedy() -> None:
    it = following("stop")
    came(it, 1, 4, 2.0, "nan", loss="inf", layer="b", why="the first in forward order whose output is not finite")
    assert it.notes[-1] == ("rank 1's loss was inf at step 4, in layer 'b' (the first in forward order whose output is "
                            "not finite), before any other's; the run ends")  # fmt: skip
    cause = it.ending.find_outcome()[1][0]
    assert (cause["rank"], cause["step"], cause["op"]) == (1, 4, "layer 'b'")
    assert "the run was ended, as on_nan='stop' says; lower the learning rate" in cause["text"]
    it = following("auto", True)
    came(it, 0, 9, 2.0, "diverged", loss="500", best="1.55")
    assert it.notes[-1].startswith("rank 0's loss was 500 at step 9, after 1.55 at its best, before")


def test_skipped_steps_give_one_note_that_names_the_rank_with_the_bad_gradient() -> None:
    it = following("skip")
    came(it, 0, 4, 2.0, "nan", loss="", layer="c", why="", skipped=True, own=False)
    came(it, 1, 4, 2.1, "nan", loss="", layer="b", why="", skipped=True, own=True)
    assert it.notes == ["rank 1's gradient was not finite at step 4, in layer 'b'; that step was skipped"]
    came(it, 0, 7, 3.0, "nan", loss="", layer="c", why="", skipped=True, own=True)
    assert it.notes == ["rank 0's gradient was not finite at step 7, in layer 'c'; that step was skipped, as 2 in all"]
    assert not it.ending.is_stop_requested and it.ending.unwatched_error is None


def test_an_older_record_without_a_layer_is_read() -> None:
    it = following("auto")
    came(it, 1, 4, 2.0, "nan", loss="nan")
    assert it.notes[-1].startswith("rank 1's loss was nan at step 4, before any other's")


def test_a_new_knob_with_its_default_keeps_cached_results_valid() -> None:
    from tests.bench.cells import told

    assert not {"on_nan", "diverged"} & told(Experiment())["Experiment"].keys()
    assert told(replace(Experiment(), on_nan="skip")) == {"Experiment": {"on_nan": "skip"}}
