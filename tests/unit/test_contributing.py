"""Tests the examples of CONTRIBUTING.md as printed: on ranks, on the simulator, in a cell, under the laws."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import cloudpickle
import pytest
import torch

from tests.howto import apply_steps, copy_project, insert
from tests.ranks import experiment, run, weights
from workbench import simulate
from workbench.compressors import Compressor
from workbench.rank import StrategyError
from workbench.settings import Change
from workbench.strategies import AdaAlter, Strategy

ROOT = Path(__file__).parents[2]
CELL = """
import sys, cloudpickle
from tests.ranks import experiment
chosen = experiment(2, 12, strategy=CoinSGD(chance=0.5))
sys.stdout.buffer.write(cloudpickle.dumps((chosen, [CoinSGD])))
"""


def printed(name: str = "CoinSGD") -> str:
    """Returns the printed example that defines this class."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    (found,) = [block for block in blocks if f"class {name}(" in block]
    return found


def defined(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, named: str = "") -> Any:
    """Returns an example's class from a file. `named` renames it if it would replace a shipped class."""
    file = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    (folder / f"{file}.py").write_text(printed(name).replace(f"class {name}(", f"class {named or name}("))
    spec = importlib.util.spec_from_file_location(file, folder / f"{file}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file, module)
    spec.loader.exec_module(module)
    return getattr(module, named or name)


def averaged(sessions: list[Any], chance: float) -> None:
    """Checks that ranks averaged every bucket in the coin's steps, and agreed after the last one."""
    steps = [step for step in range(12) if Random(step).random() < chance]
    buckets = len(sessions[0].layout.buckets)
    for session in sessions:
        assert [step for step, _, _ in session.record.comm()] == [s for s in steps for _ in range(buckets)]
    together = steps[-1] == 11
    assert torch.equal(weights(sessions[0]), weights(sessions[1])) == together


@pytest.fixture
def coin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Strategy]:
    """Returns the example's class from a file."""
    return defined("CoinSGD", tmp_path, monkeypatch)


def test_the_strategy_from_a_file_averages_alike_on_ranks_and_simulator(coin: Any) -> None:
    e = experiment(2, 12, strategy=coin(chance=0.5))
    sessions = run(e)
    averaged(sessions, 0.5)
    losses = simulate(e.set("pace", 5.0), real=True).samples.query("name == 'loss' and rank == 0")
    assert sessions[0].record.losses() == pytest.approx(losses.value.tolist(), rel=1e-5)


def test_the_strategy_from_a_cell_is_sent_to_ranks_that_lack_its_names() -> None:
    typed = subprocess.run([sys.executable, "-"], input=(printed() + CELL).encode(), capture_output=True, cwd=ROOT,
                           check=False)  # fmt: skip
    assert typed.returncode == 0, typed.stderr.decode()
    chosen, _ = cloudpickle.loads(typed.stdout)
    assert type(chosen.strategy).__module__ == "__main__"
    averaged(run(chosen), 0.5)


def same_on_both_hosts(e: Any) -> list[Any]:
    """Checks that real ranks have the simulator's losses. Returns the sessions."""
    sessions = run(e)
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s in sessions:
        losses = simulated.samples.query(f"name == 'loss' and rank == {s.rank.index}").value.tolist()
        assert s.record.losses() == pytest.approx(losses, rel=1e-5)
    return sessions


def test_the_compressor_keeps_its_range_alike_on_ranks_and_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = defined("RunningRange", tmp_path, monkeypatch)
    first, second = same_on_both_hosts(experiment(2, 12, compressor=cls()))
    assert torch.equal(weights(first), weights(second))
    kept, names = first.rank.memory.parts["running_range"], {p.name for b in first.layout.buckets for p in b.parts}
    assert set(kept) == names and all(float(reach) > 0 for reach in kept.values())
    sizes = [b.data.numel() for b in first.layout.buckets]
    assert sum(n for step, _, n in first.record.comm() if step == 5) == sum(n + 4 for n in sizes)
    near, exact = weights(first), weights(run(experiment(2, 12))[0])
    assert 0 < float((near - exact).norm() / exact.norm()) < 0.02


def test_the_printed_ada_alter_runs_alike_on_ranks_and_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = defined("AdaAlter", tmp_path, monkeypatch, named="PrintedAdaAlter")
    first, second = same_on_both_hosts(experiment(2, 12, strategy=cls(every=4), lr=0.2))
    assert torch.equal(weights(first), weights(second)), "step 12 ends a round"
    shipped = run(experiment(2, 12, strategy=AdaAlter(every=4), lr=0.2))[0]
    assert torch.equal(weights(first), weights(shipped)), "what is printed is what ships"


@pytest.mark.parametrize("ranks", [4, 6])
def test_the_torus_learns_like_ddp_and_sends_the_stated_bytes(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = defined("Torus", tmp_path, monkeypatch)
    e = experiment(ranks, 6, strategy=cls(columns=ranks // 2))
    sessions = same_on_both_hosts(e)
    assert all(torch.equal(weights(s), weights(sessions[0])) for s in sessions)
    torch.testing.assert_close(weights(sessions[0]), weights(run(experiment(ranks, 6))[0]), rtol=1e-5, atol=1e-7)
    (said,) = sessions[0].record.noted("mesh")
    assert json.loads(said[3])["dims"] == {"down": 2, "across": ranks // 2}
    sent, columns = [row for row in sessions[0].record.comm() if not row[0]], ranks // 2
    whole = sum(b.nbytes for b in sessions[0].layout.buckets)
    for way, share in (("across", 2 * (columns - 1) / columns), ("down", 2 * (1 - 1 / 2) / columns)):
        assert sum(n for _, name, n in sent if f" in {way} " in name) == pytest.approx(share * whole, rel=0.01)


def test_the_torus_switches_live_and_is_refused_where_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = defined("Torus", tmp_path, monkeypatch)
    changes = [Change(3, "strategy", cls()), Change(5, "strategy.columns", 4), Change(7, "strategy.columns", 3),
               Change(8, "strategy", "DDP")]  # fmt: skip
    sessions = run(experiment(4, 10), *changes)
    assert [json.loads(m[3])["text"] for m in sessions[0].record.noted("mesh")] == [
        "ranks are arranged as down 2 × across 2", "ranks are arranged as down 1 × across 4",
        "ranks are arranged as data 4"]  # fmt: skip
    (refused,) = sessions[0].record.noted("refused")
    assert "columns=3 does not divide 4 ranks into equal rows; use one of 1, 2, 4" in refused[3]
    torch.testing.assert_close(weights(sessions[0]), weights(run(experiment(4, 10))[0]), rtol=1e-5, atol=1e-7)


FOUND = """
import sys, pytest, workbench.compressors, workbench.strategies
workbench.strategies.__path__.append(sys.argv[1])
workbench.compressors.__path__.append(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/laws/test_quick.py", "-k", sys.argv[2], "-rA"]))
"""


def held(folder: Path, name: str) -> tuple[int, str]:
    """Returns the quick laws' verdict on a member whose file is in an additional family folder."""
    ran = subprocess.run([sys.executable, "-c", FOUND, str(folder), name], capture_output=True, text=True, cwd=ROOT,
                         check=False)  # fmt: skip
    return ran.returncode, ran.stdout


@pytest.mark.ranks
def test_the_laws_find_a_member_by_its_file_and_check_its_claims(tmp_path: Path) -> None:
    (tmp_path / "coin_sgd.py").write_text(printed())
    (tmp_path / "torus.py").write_text(printed("Torus"))
    (tmp_path / "running_range.py").write_text(printed("RunningRange"))
    code, said = held(tmp_path, "CoinSGD or RunningRange or Torus")
    assert code == 0, said
    for name, least in (("CoinSGD", 5), ("Torus", 5), ("RunningRange", 3)):
        assert len(set(re.findall(rf"^PASSED \S+::(\w+)\[.*{name}\]", said, re.M))) >= least, said


@pytest.mark.ranks
@pytest.mark.parametrize(("claim", "wrong", "law"), [
    ("periodic: ClassVar[bool] = True", "periodic: ClassVar[bool] = False", "test_ranks_that_are_never_apart"),
    ("periodic: ClassVar[bool] = True", "exact: ClassVar[bool] = True", "test_an_exact_strategy"),
    ("await rank.backward()", "await rank.backward(2.0)", "test_a_plain_strategy"),
], ids=["never apart", "exact", "plain"])  # fmt: skip
def test_a_false_claim_fails_the_matching_law(claim: str, wrong: str, law: str, tmp_path: Path) -> None:
    assert claim in printed()
    (tmp_path / "coin_sgd.py").write_text(printed().replace(claim, wrong))
    code, said = held(tmp_path, "CoinSGD")
    assert code == 1 and re.search(rf"^FAILED \S+::{law}", said, re.M), said


# instructions for several files, followed in a copy of the project


def ran(folder: Path, *words: str) -> str:
    """Runs Python in a copy of the project and returns its output. Fails the test if Python fails."""
    done = subprocess.run([sys.executable, *words], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pytest_in(folder: Path, *words: str) -> set[str]:
    """Returns the tests that pass in a copy of the project; all must."""
    said = ran(folder, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *words)
    return set(re.findall(r"^PASSED \S+::(.+)$", said, re.M))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Returns a copy of the project."""
    copy_project(tmp_path)
    return tmp_path


def test_every_function_that_the_page_sends_a_reader_to_is_in_its_file() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.S)
    places = re.findall(r"`([\w.]+)`\s+(?:in\s+|\()`((?:workbench|widgets|tests)/[\w/]+\.py)`", text)
    assert len(places) > 10
    for name, file in places:
        source = (ROOT / file).read_text()
        assert all(re.search(rf"\b{part}\b", source) for part in name.split(".")), (name, file)


@pytest.mark.ranks
@pytest.mark.long
def test_the_view_is_drawn_and_found_by_the_tests_of_views(project: Path) -> None:
    (program,) = apply_steps("Add a view", project)
    ran(project, "-c", program)
    assert "learning rate" in (project / "view.html").read_text()
    passed = pytest_in(project, "tests/unit/test_views.py", "-k", "learning_rate")
    assert {"test_every_view_draws_an_empty_and_a_recorded_run[learning_rate]",
            "test_a_live_run_read_in_pieces_gives_the_same_picture[learning_rate]"} <= passed  # fmt: skip


@pytest.mark.ranks
@pytest.mark.long
def test_the_live_knob_is_set_on_both_hosts_and_has_a_control(project: Path) -> None:
    apply_steps("Add a live knob", project)
    assert len(pytest_in(project, "tests/unit/test_lr_half.py")) == 2
    assert pytest_in(project, "tests/unit/test_controls.py", "-k", "every_knob_has_a_control and DDP-Dense")


@pytest.mark.ranks
@pytest.mark.long
def test_the_sample_is_recorded_on_both_hosts_and_read(project: Path) -> None:
    apply_steps("Add a sample", project)
    assert len(pytest_in(project, "tests/unit/test_largest_weight.py")) == 2


@pytest.mark.ranks
@pytest.mark.long
def test_the_task_learns_and_is_found_by_the_tests_of_tasks(project: Path) -> None:
    (program,) = apply_steps("Add a task", project)
    losses = json.loads(ran(project, "-c", program))
    assert losses[0] > 0.5 and losses[-1] < 0.1
    assert pytest_in(project, "tests/unit/test_tasks.py", "tests/unit/test_knobs.py", "-k", "shipped or survives")


def test_an_insertion_needs_exactly_one_matching_line(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("a = 1\nb = 2\nbb = 3\n")
    insert(file, "a =", "c = 4\n")
    assert file.read_text() == "a = 1\nc = 4\nb = 2\nbb = 3\n"
    for wrong, count in (("b =", 2), ("d =", 0)):
        with pytest.raises(ValueError, match=f"{count} lines contain"):
            insert(file, wrong, "")


class Reduces(Strategy):
    """Requests one all-reduce of `x` per step, by `how`."""

    x: Any = torch.zeros(3)
    how: str = "sum"

    async def step(self, rank: Any, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        x = self.x + rank.index
        got = await rank.all_reduce(x, self.how, "asked")
        await rank.sample("same", float(got is x or rank.size == 1))
        await rank.sample("first", float(got[0]))


def reducing(how: str, x: Any, ranks: int = 3) -> Any:
    kind = type("Reducing", (Reduces,), {"x": x, "how": how, "__module__": __name__})
    return experiment(ranks, 2, strategy=kind())


def seen(e: Any, host: str) -> set[float]:
    """Returns the values of `got[0]` on a host."""
    if host == "engine":
        rows = [v for s in run(e) for _, name, _, v in s.record.samples if name == "first"]
    else:
        rows = simulate(e.set("pace", 5.0), real=True).samples.query("name == 'first'").value.tolist()
    return set(rows)


@pytest.mark.parametrize("host", ["engine", "simulator"])
def test_a_mean_is_the_sum_divided_by_the_ranks_on_both_hosts(host: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert seen(reducing("mean", torch.full((3,), 4.0, dtype=dtype)), host) == {5.0}
    assert seen(reducing("mean", torch.full((3,), 4.0), ranks=1), host) == {4.0}
    assert seen(reducing("max", torch.full((3,), 4.0)), host) == {6.0}
    assert seen(reducing("min", torch.full((3,), 4.0)), host) == {4.0}


def test_a_mean_sends_the_bytes_of_a_sum_and_is_recorded_once() -> None:
    of = {how: [s.record.comm() for s in run(reducing(how, torch.ones(5)))] for how in ("sum", "mean")}
    assert of["sum"] == of["mean"] and all(len(rows) == 2 for rows in of["mean"])


@pytest.mark.parametrize(("how", "x", "said"), [
    ("avg", torch.zeros(3), "op='avg' must be one of 'sum', 'mean', 'max', 'min'"),
    ("mean", torch.zeros(3, dtype=torch.int64), "op='mean' of torch.int64"),
])  # fmt: skip
@pytest.mark.parametrize("host", ["engine", "simulator"])
def test_unsupported_reductions_are_refused_by_name(host: str, how: str, x: Any, said: str) -> None:
    with pytest.raises((StrategyError, AssertionError), match=re.escape(said)):
        seen(reducing(how, x, 2), host)


def test_a_hook_that_must_not_be_async_is_refused_at_definition() -> None:
    async def hook(self: Any, rank: Any) -> dict[str, int]:
        return {"made": 0}

    for name in ("init", "trains", "refuses", "hands_on"):
        with pytest.raises(TypeError, match=f"Wrong.{name}: must be `def {name}.*not `async def`"):
            type("Wrong", (Strategy,), {name: hook})


@pytest.mark.parametrize(
    ("base", "name", "now"),
    [(Strategy, "heard", "propagation"), (Strategy, "crosses", "in_flight"), (Strategy, "settle", "drain"),
     (Compressor, "owes", "residual")],
)  # fmt: skip
def test_an_old_hook_name_is_refused_with_the_new_name(base: type, name: str, now: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name}: is now called `{now}`"):
        type("Mine", (base,), {name: True})


@pytest.mark.parametrize("name", ["step", "leave", "drain", "background", "known"])
def test_a_hook_that_is_awaited_must_be_async(name: str) -> None:
    async def yields(self: Any, rank: Any, state: Any) -> Any:
        yield 1

    for hook in (lambda self, rank, state: None, yields):
        with pytest.raises(TypeError, match=f"Wrong.{name}: must be `async def {name}"):
            type("Wrong", (Strategy,), {name: hook})


def test_a_hook_with_wrong_parameters_is_refused_at_definition() -> None:
    with pytest.raises(TypeError, match=r"Wrong.init: must take \(self, rank, params\)"):
        type("Wrong", (Strategy,), {"init": lambda self, rank: None})
    assert type("Right", (Strategy,), {"init": lambda self, *given: given}).init is not Strategy.init
