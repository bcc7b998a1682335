"""Tests models that cannot be split over ranks, or not in this way: the error suggests an alternative."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.ranks import ended, live, run, toy
from tests.split import PLAN, Small, entropy, near, small, spread, texts, together
from tests.unit.test_tensor import parts
from workbench import simulate
from workbench.compressors import DGC
from workbench.experiment import Experiment
from workbench.host.placement.tensor_split import split_model
from workbench.optimizers import LAMB, SGD
from workbench.partitions import Pipeline, Tensor
from workbench.settings import Change, KnobError
from workbench.strategies import AsyncServer, SelSync, ZeRO3
from workbench.tasks import ByteGPT, Colwise, Rowwise, TaskError

pytestmark = pytest.mark.ranks

REFUSED = [
    ({"partition": Tensor(ways=3)}, "ways=3: one replica takes 3 ranks, and 4 ranks are not a multiple of that"),
    ({"partition": Tensor(), "strategy": ZeRO3()}, "ranks shard parameters that"),
    ({"partition": Tensor(), "strategy": AsyncServer()}, "ranks also exchange in the background"),
    (
        {"partition": Tensor(), "strategy": SelSync()},
        "a rank needs all gradients or examples of its replica",
    ),
    ({"partition": Tensor(), "optimizer": LAMB()}, "is not known to step each element by itself"),
    ({"partition": Pipeline(of=Pipeline())}, "a stage cannot contain stages; take of=Tensor()"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words[:24] for _, words in REFUSED])
def test_incompatible_settings_raise_knob_error(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KnobError, match=re.escape(words)):
        replace(Experiment(), **given).checked()


def tied() -> nn.Module:
    model = Small()
    model.head.weight = model.words.weight
    return model


def frozen() -> nn.Module:
    model = Small()
    model.blocks[1].up.weight.requires_grad_(False)
    return model


def padded() -> nn.Module:
    model = Small()
    model.words = nn.Embedding(32, 16, max_norm=1.0)
    return model


ODD = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
SLIPS: list[tuple[Any, Any, int, str]] = [
    (Small, {"blocks.*.upp": Colwise()}, 2, "the plan names blocks.*.upp, and the model has no such module"),
    (Small, {"norm": Colwise()}, 2, "norm is of class LayerNorm, and Colwise splits Linear; remove it from the "),
    (Small, {"words": Colwise()}, 2, "words is of class Embedding, and Colwise splits Linear"),
    (Small, {"head": "sharded"}, 2, "the plan has 'sharded' for head; use Colwise() or Rowwise()"),
    (Small, PLAN, 8, "ways=8: blocks.0.q has 16 outputs, in groups of 4 that stay together, which cannot be split "
                     "evenly over the ranks; take ways=2 or 4"),
    (Small, {"head": Colwise(packed=3)}, 2, "head has 32 outputs, which do not make 3 matrices of one size"),
    (tied, {**PLAN, "head": Rowwise()}, 2, "words.weight is tied, and head would split it along "
                                                               "another"),
    (tied, {"head": Colwise(gather=True)}, 2, "is tied, and words needs it whole; split both along the same "),
    (frozen, PLAN, 2, "parameter blocks.1.up.weight is frozen"),
    (padded, PLAN, 2, "words: an Embedding with max_norm, scale_grad_by_freq or sparse gradients"),
    (lambda: ODD, None, 4, "ways=4: 0 has 6 outputs, which cannot be split evenly over the ranks; take ways=2 "
                           "or 3 or 6"),
    (lambda: nn.Sequential(nn.Linear(4, 4)), None, 2, "no plan says how to split a Sequential without"),
    (lambda: nn.Bilinear(2, 2, 2), None, 2, "no plan says how to split Bilinear over ranks; give the task `split`"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "ways", "words"), SLIPS, ids=[words[:30] for *_, words in SLIPS])
def test_an_impossible_plan_raises_knob_error(model: Any, plan: Any, ways: int, words: str) -> None:
    task = toy(model=model, data=texts, loss=entropy, evaluate=None, **({"split": lambda _: plan} if plan else {}))
    with pytest.raises(KnobError, match=re.escape(words)):
        split_model(ways, model(), task.build())


def test_each_suggested_number_of_ways_works() -> None:
    """ByteGPT's 256 rows could be split over 8 ranks, but not its four heads."""
    learner = ByteGPT().build()
    with pytest.raises(KnobError, match=r"ways=3: byte has 256 rows.*; take ways=2 or 4$"):
        split_model(3, learner.model(), learner)
    assert split_model(2, learner.model(), learner) and split_model(4, learner.model(), learner)


def test_the_error_about_uneven_positions_mentions_nothing_else() -> None:
    e = Experiment(task=ByteGPT(context=63), ranks=2, steps=2, pace=5.0, partition=Tensor(sequence=True))
    with pytest.raises(KnobError, match="63 positions cannot be split evenly over 2 ranks; take") as refused:
        simulate(e)
    assert "meta device" not in str(refused.value)


def test_a_plan_that_is_no_dict_is_refused() -> None:
    with pytest.raises(KnobError, match=re.escape("split(model) returned None: must return a dict")):
        split_model(2, Small(), small(split=lambda _: None).build())
    with pytest.raises(TaskError, match="must return a dict"):
        small(split=lambda _: [1]).build().split(Small())  # type: ignore[misc]


SILENT: list[tuple[Mapping[str, Any], str]] = [
    ({"blocks.*.up": Colwise()}, "the slices of a rank fail"),
    ({"blocks.*.down": Rowwise()}, "the slices of a rank fail"),
    ({"blocks.*.q": Colwise(), "blocks.*.k": Colwise(), "blocks.*.v": Colwise()}, "the slices of a rank fail"),
    ({"blocks.*.up": Colwise(gather=True), "blocks.*.down": Rowwise()}, "the slices of a rank fail"),
    ({"head": Colwise()}, "the slices of a rank fail"),
]


@pytest.mark.parametrize(("plan", "words"), SILENT, ids=[", ".join(plan) for plan, _ in SILENT])
def test_a_plan_with_a_wrong_result_is_refused_before_any_move(plan: Any, words: str) -> None:
    """The change is refused live and the run goes on. This includes a last layer that begins as zero and hides
    errors.
    """

    def zero() -> nn.Module:
        model = Small()
        nn.init.zeros_(model.head.weight)
        return model

    sessions = run(spread(2, 6, task=small(model=zero, split=lambda _: plan)), Change(3, "partition", Tensor()))
    ((*_, refused),) = sessions[0].record.noted("refused")
    assert words in refused and not sessions[0].record.noted("partition")
    assert all(s.phase == "done" for s in sessions)


def test_a_module_between_two_layers_must_work_feature_by_feature() -> None:
    """A softmax over one rank's features computes a wrong result, so the run is refused at the start."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 2))
    task = toy(model=lambda: model, data=pairs, loss=squares, evaluate=None,
               split=lambda _: {"0": Colwise(), "2": Rowwise()})  # fmt: skip
    sessions = live(spread(2, 6, task=task, partition=Tensor()))
    ended(sessions)
    assert any("0.weight would get another gradient than in the whole model" in str(s.error) for s in sessions)


def pairs(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 6, generator=rng), 5 * torch.randn(8, 2, generator=rng)) for _ in range(4)]


def squares(model: nn.Module, pair: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(pair[0]), pair[1])


def test_tied_weights_are_split_the_same_way() -> None:
    """The vocabulary is that of the embedding and of the head."""
    e = spread(2, 6, task=small(model=tied), partition=Tensor())
    (plain,) = run(spread(1, 6, task=small(model=tied)))
    near(together(run(e)), {p.name: p.param.data for p in plain.layout.order})


def test_frozen_parameters_and_buffers_stay_on_every_rank() -> None:
    def some() -> nn.Module:
        model = Small()
        model.norm.weight.requires_grad_(False)
        model.register_buffer("count", torch.zeros(3))
        return model

    sessions = run(spread(2, 6, task=small(model=some), partition=Tensor()))
    (plain,) = run(spread(1, 6, task=small(model=some)))
    near(together(sessions), {p.name: p.param.data for p in plain.layout.order})
    assert all(torch.equal(s.model.norm.weight, Small().norm.weight) and s.model.count.shape == (3,) for s in sessions)


def test_a_model_of_transformers_brings_its_own_plan() -> None:
    """The plan uses transformers' names for the ways."""

    class Planned(Small):
        _tp_plan: ClassVar[dict[str, str]] = {
            "words": "embedding_rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_rep",
        }  # fmt: skip

    task = toy(model=Planned, data=texts, loss=entropy, evaluate=None)
    sessions = run(spread(2, 6, task=task, partition=Tensor()))
    (plain,) = run(spread(1, 6, task=task))
    near(together(sessions), {p.name: p.param.data for p in plain.layout.order})
    assert "blocks.1.up.weight" in sessions[0].training.spread.split.sliced


def test_members_that_need_whole_tensors_are_refused_under_slices() -> None:
    e = spread(2, 12, partition=Tensor(), task=small(parts=parts))
    asked = [("optimizer", LAMB()), ("strategy", ZeRO3()), ("ways", 4), ("compressor", DGC())]
    sessions = run(e, *[Change(2 + k, path, value) for k, (path, value) in enumerate(asked)])
    assert len(sessions[0].record.noted("refused")) >= 3 and all(s.phase == "done" for s in sessions)


def test_different_batches_on_the_ranks_of_a_replica_raise_an_error() -> None:
    count = iter(range(10**6))

    def own(rank: int, ranks: int, seed: int) -> Any:
        return [torch.randint(0, 32, (8, 7), generator=torch.Generator().manual_seed(next(count))) for _ in range(8)]

    sessions = live(spread(2, 6, task=small(data=own), partition=Tensor()))
    ended(sessions)
    assert any("read different batches" in str(s.error) for s in sessions)


def test_byte_gpt_suggests_a_possible_number_of_ways() -> None:
    e = Experiment(task=ByteGPT(width=48, heads=6), ranks=4, partition=Tensor(ways=4), optimizer=SGD())
    learner = e.task.build()
    said = re.escape("blocks.0.qkv has 48 outputs, in groups of 8 that stay together")
    with pytest.raises(KnobError, match=f"{said}.* take ways=2$"):  # 256 rows cannot be split over 3 ranks
        split_model(4, learner.model(), learner)
