"""Tests sharding within groups (HSDP), and second shards within groups (hpZ of ZeRO++)."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from tests.ranks import run, weights
from tests.sim.virtual import comm
from tests.unit.test_zero_3 import many, seen
from workbench import simulate
from workbench.compressors import TopK
from workbench.experiment import Experiment
from workbench.optimizers import AdamW
from workbench.rank import Rank
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, HSDP, HpZ, Strategy, ZeRO3
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks

GPT = Experiment(task=ByteGPT(layers=4), ranks=4, steps=6, eval_every=0, optimizer=AdamW(), bucket_mb=0.1, batch=2)


def by_group(rows: list[tuple[int, str, int]], step: int) -> dict[str, int]:
    """Returns a step's bytes by verb and dimension of the mesh; "all" for all ranks."""
    found: dict[str, int] = defaultdict(int)
    for at, what, n in rows:
        if at == step:
            where = what.partition(" in ")[2].partition(" ")[0] or "all"
            found[f"{what.split()[0]} {where}"] += n
    return dict(found)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_groups_of_any_size_train_like_ddp_up_to_rounding(group: int) -> None:
    ours, plain = (run(many(4, strategy=s, eval_every=4)) for s in (HSDP(group=group), DDP()))
    assert all(torch.equal(weights(s), weights(ours[0])) for s in ours)
    torch.testing.assert_close(weights(ours[0]), weights(plain[0]), rtol=1e-4, atol=1e-5)
    assert seen(ours[0], "held_out") == pytest.approx(seen(plain[0], "held_out"), rel=1e-5)


@pytest.mark.parametrize("strategy", [HSDP(), HpZ(), HpZ(group=4)], ids=str)
def test_engine_and_simulator_send_the_same_in_the_same_groups(strategy: Strategy) -> None:
    sessions, model = run(GPT.set("strategy", strategy)), simulate(GPT.set("strategy", strategy).set("pace", 10.0))
    for rank in (0, 3):
        assert sorted(sessions[rank].record.comm()) == sorted(tuple(row) for row in comm(model, rank))
    held = model.samples[model.samples["rank"] == 0].groupby("name", observed=True).value.last()
    for what in ("parameters", "optimizer state"):
        assert seen(sessions[0], f"memory {what}")[-1] == pytest.approx(held[f"memory {what}"], rel=0.01)


def test_a_group_holds_the_model_and_a_share_travels_between_groups() -> None:
    session = run(GPT.set("strategy", HSDP(group=2)))[0]
    psi, largest = session.layout.byte_count, max(b.nbytes for b in session.layout.buckets)
    sent = by_group(session.record.comm(), 4)
    assert set(sent) == {"all_gather within", "reduce_scatter within", "all_reduce between"}
    assert sent["reduce_scatter within"] == pytest.approx(psi / 2, rel=0.01)
    assert psi - largest <= sent["all_gather within"] <= psi * 1.01, "twice a half"
    assert sent["all_reduce between"] == pytest.approx(psi / 2, rel=0.01), "2 (q-1)/q of a half"
    assert seen(session, "memory optimizer state")[-1] == pytest.approx(2 * psi / 2, rel=0.02)
    assert psi / 2 <= seen(session, "memory parameters")[-1] <= psi / 2 + 2 * largest


@pytest.mark.long
def test_second_shards_keep_backward_gathers_within_groups_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    made = HpZ.step

    async def counted(self: HpZ, rank: Rank, state: object) -> None:
        await made(self, rank, state)
        kept.append(len(state.seconds))  # type: ignore[attr-defined]

    monkeypatch.setattr(HpZ, "step", counted)
    session, usual = run(GPT.set("strategy", HpZ(group=2)))[0], run(GPT.set("strategy", ZeRO3()))[0]
    ours, zero = (by_group(s.record.comm(), 4) for s in (session, usual))
    psi, most = session.layout.byte_count, max(b.nbytes for b in session.layout.buckets)
    assert 3 * psi / 4 - most <= ours["all_gather all"] <= 3 * psi / 4 * 1.01
    assert psi / 2 - most <= ours["all_gather within"] <= psi / 2
    assert ours["reduce_scatter all"] == zero["reduce_scatter all"] and len(kept) == 4 * 6 and not any(kept)
    for one, other in zip(run(many(4, strategy=HpZ(), eval_every=3)), run(many(4, strategy=ZeRO3(), eval_every=3)),
                          strict=True):  # fmt: skip
        assert torch.equal(weights(one), weights(other)) and seen(one, "held_out") == seen(other, "held_out")


def test_second_shards_count_as_parameters_on_both_hosts() -> None:
    e, held = GPT.set({"strategy": HpZ(group=2), "pace": 10.0}), {}
    for real in (True, False):
        model = simulate(e, real=real)
        held[real] = model.samples.query("rank == 0 and name == 'memory parameters'").value.iloc[-1]
    session = run(e)[0]
    psi, largest = session.layout.byte_count, max(b.nbytes for b in session.layout.buckets)
    assert psi / 4 + psi / 2 < held[True] < psi / 4 + psi / 2 + 2 * largest
    assert held[False] == held[True] == seen(session, "memory parameters")[-1]


def test_groups_change_live() -> None:
    changes = [Change(3, "strategy", "HSDP"), Change(6, "strategy.group", 4), Change(8, "strategy.prefetch", 2),
               Change(10, "strategy.group", 1), Change(12, "bucket_mb", 0.05), Change(14, "strategy.group", 2),
               Change(16, "strategy", "HpZ"), Change(18, "strategy.group", 4), Change(20, "strategy", "HSDP"),
               Change(22, "strategy", "LocalSGD"), Change(24, "strategy", "HSDP")]  # fmt: skip
    sessions = run(many(4, 28, eval_every=2), *changes)
    assert len(sessions[0].record.noted("change")) == len(changes)
    assert all(torch.equal(weights(s), weights(sessions[0])) for s in sessions)
    plain = run(many(4, 21, eval_every=2), changes[4])
    assert seen(sessions[0], "held_out")[:11] == pytest.approx(seen(plain[0], "held_out")[:11], rel=1e-4)


def test_a_compressor_acts_among_all_ranks() -> None:
    ours, plain = (run(many(4, strategy=s, compressor=TopK.usual())) for s in (HSDP(), ZeRO3()))
    assert torch.equal(weights(ours[0]), weights(plain[0]))
    plain_ddp = run(many(4, compressor=TopK.usual()))
    torch.testing.assert_close(weights(ours[0]), weights(plain_ddp[0]), rtol=1e-4, atol=1e-5)


def test_the_gradient_is_clipped_by_the_norm_of_one_replica() -> None:
    ours, plain = (run(many(4, 8, strategy=s, clip=0.05)) for s in (HSDP(), DDP()))
    norms = [seen(s[0], "grad_norm") for s in (ours, plain)]
    assert len(norms[0]) == 8 and norms[0] == pytest.approx(norms[1], rel=1e-4) and min(norms[0]) > 0.05


@pytest.mark.parametrize("cls", [HSDP, HpZ])
def test_groups_that_do_not_fit_are_refused_with_a_reason(cls: type[Strategy]) -> None:
    with pytest.raises(KnobError, match="group=3 does not divide 4 ranks into equal groups; use one of 1, 2, 4"):
        many(4, strategy=cls(group=3)).checked()
    sessions = run(many(4, 6, strategy=cls()), Change(3, "strategy.group", 3))
    assert "use one of 1, 2, 4" in sessions[0].record.noted("refused")[0][3]
