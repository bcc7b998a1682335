"""Checks that a script's options of DistributedDataParallel hold on real ranks or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.labs import shared_lab
from tests.torchrun import HERE, started_by_torchrun
from workbench.cluster.run.rank_errors import RankError
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.run import Run
from workbench.settings import Change
from workbench.strategies import DDP, LocalSGD, Strategy, TorchDDP
from workbench.tasks import Script

pytestmark = pytest.mark.engine


lab = shared_lab(2, "numbers")


class Case(NamedTuple):
    """The script, its arguments, the strategies to test, and the allowed distance of DDP from torch's numbers."""

    script: str
    words: tuple[str, ...] = ()
    strategies: tuple[Strategy, ...] = (TorchDDP(), DDP())
    far: float = 1e-5


CASES = [
    Case("batchnorm"),
    Case("batchnorm", ("--own-statistics",)),
    Case("options"),
    Case("compiled"),
    Case("head_outside"),
    Case("hook", strategies=(TorchDDP(),)),
    Case("sparse_rows", strategies=(TorchDDP(), LocalSGD(every=1))),
]


def run_in(lab: Lab, case: Case, strategy: Strategy, out: Path, *changes: Change) -> Run:
    task = Script(file=str(HERE / f"{case.script}.py"), args=(str(out), *case.words))
    return lab.run(Experiment(task=task, ranks=2, strategy=strategy, eval_every=0), changes).wait(300)


LIBRARIES = [  # accelerate keeps its state in the process, so a second script finds it
    pytest.param(case, marks=pytest.mark.long)
    for case in (Case("by_accelerate", strategies=(TorchDDP(),)), Case("by_lightning"))
]


@pytest.mark.parametrize("case", [*CASES, *LIBRARIES], ids=lambda case: "".join((case.script, *case.words)))
def test_a_script_gives_the_numbers_of_torchrun(lab: Lab, case: Case, tmp_path: Path) -> None:
    if case.script.startswith("by_"):
        pytest.importorskip(case.script.removeprefix("by_"))
    plain = started_by_torchrun(case.script, tmp_path / "plain.pt", (str(tmp_path / "plain.pt"), *case.words))
    for strategy in case.strategies:
        run = run_in(lab, case, strategy, tmp_path / "ours.pt")
        assert (run.state, run.made) == ("done", 12)
        found, off = torch.load(tmp_path / "ours.pt"), 0.0 if strategy == TorchDDP() else case.far
        if not isinstance(strategy, LocalSGD):  # LocalSGD averages Adam's result of each rank's gradients
            torch.testing.assert_close(found, plain, rtol=off, atol=off)


def test_the_scripts_bucket_size_holds_until_a_person_changes_it(lab: Lab, tmp_path: Path) -> None:
    for strategy in (TorchDDP(), DDP()):
        run = run_in(lab, Case("options"), strategy, tmp_path / "out.pt", Change(6, "bucket_mb", 4.0))
        spans = run.spans
        sums = spans[(spans.lane == "comm") & (spans["rank"] == 0) & spans.name.str.startswith("all_reduce")]
        buckets = sums.groupby("step").name.nunique()
        assert buckets[5] > 1 and buckets[11] == 1
        assert [(change.at_step, change.path) for change in run.changes] == [(0, "bucket_mb"), (6, "bucket_mb")]
        assert run.changes[0].value == pytest.approx(0.016384)


def test_a_summary_warns_that_the_scripts_hook_exchanges_the_gradients(lab: Lab, tmp_path: Path) -> None:
    run = run_in(lab, Case("hook"), TorchDDP(), tmp_path / "out.pt", Change(6, "strategy", "DDP"))
    assert ["communication hook signs" in text for text in run.summary()["warnings"]] == [True]
    ((_, _, refused),) = run.details("refused")
    assert "strategy=DDP" in refused["reason"] and "hook signs" in refused["reason"]


BEGINNING = """
import pathlib, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
first, second = nn.Linear(4, 4), nn.Linear(4, 4)
"""
END = """
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    pathlib.Path("stepped").touch()
"""
REFUSED: dict[str, tuple[str, str]] = {
    "fully_shard": ("""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = first
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
""", "shards its model itself"),
    "no wrapper": ("model = first", "updates a model without a DistributedDataParallel around it"),
    "two models": ("model, other = DDP(first), DDP(second)", "trains two models"),
    "join": ("""
model = DDP(first)
with model.join():
    pass
""", "join"),
    "Join": ("""
from torch.distributed.algorithms.join import Join
model = DDP(first)
with Join([model]):
    pass
""", "join"),
    "a part of the ranks": ("""
groups = [dist.new_group([r]) for r in range(2)]
model = DDP(first, process_group=groups[rank])
""", "has 1 of 2 ranks"),
    "init_sync": ("""
nn.init.constant_(first.weight, rank)
model = DDP(first, init_sync=False)
""", "ranks start with different parameters"),
    "ignored": ("""
DDP._set_params_and_buffers_to_ignore_for_model(first, ["bias"])
model = DDP(first)
""", "excludes parameter 'bias'"),
    "mixed_precision": ("""
from torch.nn.parallel.distributed import _MixedPrecision
model = DDP(first, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
""", "mixed_precision"),
    "delayed": ("""
both = nn.Sequential(first, second)
model = DDP(both, delay_all_reduce_named_params=[("0.weight", first.weight)], param_to_hook_all_reduce=second.weight)
""", "delay_all_reduce_named_params"),
    "builtin hook": ("""
model = DDP(first)
model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
""", "written in Python"),
}  # fmt: skip


NO_STEPS = """
model = DDP(first)
with torch.no_grad():
    model(torch.ones(2, 4))
print("found it finished")
dist.destroy_process_group()
"""


def test_a_script_without_remaining_steps_ends_as_done(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BEGINNING + NO_STEPS)
    task = Script(file="script.py", folder=str(tmp_path))
    run = lab.run(Experiment(task=task, ranks=2, strategy=DDP(), eval_every=0)).wait(120)
    assert (run.state, run.made) == ("done", 0)
    assert any("ended without a step" in text for text in run.summary()["warnings"])
    assert "found it finished" in "".join(line["text"] for _, _, line in run.details("log"))


SAVES = """
model = DDP(nn.Sequential(first, second))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step(), optimizer.zero_grad()
state = model.state_dict()
if rank == 0:
    print("parts", len({x.untyped_storage().data_ptr() for x in state.values()}), "of", len(state), end=";")
    print("sizes", {x.untyped_storage().nbytes() - x.nbytes for x in second.state_dict().values()}, end=";")
    state["module.0.bias"].fill_(7.0)
    print("bias", set(first.bias.tolist()))
"""


def test_a_scripts_state_dict_holds_tensors_with_memory_of_their_own(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BEGINNING + SAVES)
    task = Script(file="script.py", folder=str(tmp_path))
    for strategy in (TorchDDP(), DDP()):
        run = lab.run(Experiment(task=task, ranks=2, strategy=strategy, eval_every=0)).wait(120)
        said = "".join(line["text"] for _, _, line in run.details("log"))
        assert "parts 4 of 4;sizes {0};bias {7.0}" in said  # safetensors refuses or drops tensors that share memory


def refusal(lab: Lab, task: Script, strategy: Strategy) -> str:
    """Returns the error with which a run of this script ends."""
    run = lab.run(Experiment(task=task, ranks=2, strategy=strategy, eval_every=0))
    with pytest.raises(RankError) as error:
        run.wait(120)
    assert run.state == "failed" and run.made == 0
    return str(error.value)


@pytest.mark.parametrize("what", REFUSED)
def test_an_unsupported_script_is_refused_before_the_first_step(lab: Lab, what: str, tmp_path: Path) -> None:
    made, said = REFUSED[what]
    (tmp_path / "script.py").write_text(BEGINNING + made + END)
    assert said in refusal(lab, Script(file="script.py", folder=str(tmp_path)), TorchDDP())
    assert not (tmp_path / "stepped").exists()


@pytest.mark.parametrize(("name", "said"), [("hook", "communication hook signs"), ("sparse_rows", "SparseAdam takes")])
def test_a_script_for_torchs_ddp_only_is_refused_under_ddp(lab: Lab, name: str, said: str, tmp_path: Path) -> None:
    task: Any = Script(file=str(HERE / f"{name}.py"), args=(str(tmp_path / "out.pt"),))
    text = refusal(lab, task, DDP())
    assert said in text and "strategy=DDP" in text and "TorchDDP" in text
