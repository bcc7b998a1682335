"""Tests the pages: links work, copies of code are current, and named things exist."""

from __future__ import annotations

import inspect
import pkgutil
import re
import shlex
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import workbench
from tests import howto_pages, links, reference, tables
from tests.ranks import run
from workbench import Experiment, simulate, tasks
from workbench.cli import app, begun, setting
from workbench.experiment import user_input
from workbench.fabric import Fabric, Link
from workbench.rank import Rank
from workbench.settings import knobs

ROOT = Path(__file__).parent.parent.parent
HOWTO = ROOT / "docs" / "howto"
EVERY = [m for base, _ in reference.FAMILIES.values() for m in reference.shipped(base)]
WITHOUT_PAPER = {  # not from a paper
    "ByGroup", "ByHand", "Dense", "TaskOwn", "Task", "Script", "Loop", "Crash", "Freeze", "Noisy", "Slow",
    "TransientStraggler",
}  # fmt: skip


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("path", links.pages(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_work(path: Path) -> None:
    assert links.broken(path) == []


def test_a_broken_link_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(links, "ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# A `b`, c\n\n## Twice\n\n## Twice\n\n```\n# not one\n```\n")
    good = ["there.md", "#here", "there.md#a-b-c", "there.md#twice-1", "https://example.org/gone", "mailto:a@b.c"]
    bad = ["gone.md", "#gone", "there.md#twice-2", "there.md#not-one", "../there.md", "gone.png"]
    shown = "\n".join(f"[x]({target})" for target in [*good, *bad[:-1]])
    (tmp_path / "page.md").write_text(f"# Here\n\n{shown}\n![x]({bad[-1]})\n`[x](code.md)`\n")
    assert links.broken(tmp_path / "page.md") == bad


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda p: p.stem)
def test_copies_of_code_on_pages_are_current(path: Path) -> None:
    text = path.read_text()
    assert text == tables.filled(text), "run: make tables"


@pytest.mark.parametrize("path", tables.STUBS, ids=lambda p: p.parent.name)
def test_stub_files_for_editors_are_current(path: Path) -> None:
    assert path.read_text() == tables.stub(path), "run: make tables"


@pytest.mark.parametrize("member", EVERY, ids=lambda m: m.__name__)
def test_a_member_names_its_use_and_its_paper(member: type[Any]) -> None:
    said = inspect.getdoc(member) or ""
    assert re.search(rf"^{reference.WHEN} \S", said, re.M)
    assert (f"\n{reference.PAPER} " in said) != (member.__name__ in WITHOUT_PAPER)


@pytest.mark.parametrize("name", reference.FAMILIES)
def test_every_member_is_on_its_page_with_all_knobs(name: str) -> None:
    text = page(f"reference/{'fabric' if name in reference.SECTIONS else name}.md")
    assert f"<!-- reference {name} -->" in text
    for member in reference.shipped(reference.FAMILIES[name][0]):
        (part,) = re.findall(rf"^##+ {member.__name__}\n(.*?)(?=^##+ |\Z)", text, re.S | re.M)
        for k in knobs(member):
            (line,) = [line for line in part.splitlines() if line.startswith(f"| `{k.name}` |")]
            assert f"| {reference.span(k)} | {k.unit} | " in line and reference.prose(k.doc) in line


def test_every_verb_and_every_setting_is_on_its_page() -> None:
    every = [item for part in Rank.__mro__[:-1] for item in vars(part).items()]
    verbs = [name for name, f in every if inspect.isfunction(f) and not name.startswith("_")]
    verbs += [name for family in reference.list_verb_families() for name in reference.list_family_verbs(family)]
    assert re.findall(r"^### (\w+)$", page("reference/verbs.md"), re.M) == verbs
    for k in knobs(Experiment):
        assert f"\n| `{k.name}` | " in page("reference/experiment.md")


def test_markup_characters_of_docstrings_are_escaped() -> None:
    assert reference.prose("k = density * n,\nE ||x|| < a_i, _b.py, x[0](1)") == (
        r"k = density \* n, E \|\|x\|\| \< a_i, \_b.py, x\[0\](1)"
    )
    assert reference.prose("`a * b` and * c") == r"`a * b` and \* c"
    assert reference.shown("    x <- y\n      <- z") == "```text\nx <- y\n  <- z\n```"
    assert (
        reference.linked("https://a.org/b, then (https://c.org/d).") == "<https://a.org/b>, then (<https://c.org/d>)."
    )
    assert reference.linked("see docs/project/gpu.md.") == "see [docs/project/gpu.md](../project/gpu.md)."


def test_the_page_of_wishes_is_counted_and_its_tests_exist() -> None:
    rows = re.findall(r"^\| (\d+) \| .+? \| \**(yes|partly|no)\** \| (.+) \|$", page("project/wanted.md"), re.M)
    assert [int(number) for number, *_ in rows] == list(range(1, 72))
    count = Counter(verdict for _, verdict, _ in rows)
    assert f"Of 71: **{count['yes']} yes, {count['partly']} partly, {count['no']} no.**" in page("project/wanted.md")
    for number, verdict, where in rows:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", where)
        assert named or verdict != "yes", number
        for path, test in named:
            text = next(p for p in (ROOT / "tests" / path, ROOT / path) if p.exists()).read_text()
            assert f"def {test}" in text, (number, path, test)


def test_every_lesson_is_on_the_list() -> None:
    listed = re.findall(r"\(\.\./\.\./(notebooks/\S+\.ipynb)\)", page("learn/lessons.md"))
    assert listed == [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "notebooks").glob("*.ipynb"))]


# commands and settings on the pages


@pytest.mark.parametrize("name", ["strategies", "compressors", "optimizers", "fabric"])
def test_settings_that_a_page_suggests_are_valid(name: str) -> None:
    experiment = Experiment()
    names = {name: getattr(workbench, name) for name in workbench.__all__}
    for call in re.findall(r"`lab\.set\((\".*?)\)`", page(f"reference/{name}.md")):
        experiment = experiment.set(*eval(f"({call})", names))
    assert experiment != Experiment()


def shell_lines(*names: str) -> list[str]:
    """Returns the lines of the sh blocks of these how-to pages that begin with `workbench`."""
    found = [text for name in names for _, text in howto_pages.blocks(HOWTO / f"{name}.md", "sh")]
    return [line for text in found for line in text.splitlines() if line.startswith("workbench ")]


def test_the_command_lines_of_the_pages_have_valid_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    group = typer.main.get_command(app)
    lines = shell_lines(*(path.stem for path in howto_pages.PAGES))
    for line in lines:
        _, name, *arguments = shlex.split(line, comments=True)
        command = group.commands[name]  # type: ignore[attr-defined]
        command = command.commands[arguments.pop(0)] if hasattr(command, "commands") else command
        context = command.make_context(name, arguments)
        assert context.params, line
    assert len(lines) >= 14


def test_the_settings_of_the_pages_runs_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    lines = shell_lines("run_a_torchrun_script", "use_the_command_line")
    found = []
    for words in (shlex.split(line, comments=True) for line in lines if line.startswith("workbench run ")):
        turns = [setting(words[i + 1]) for i, word in enumerate(words) if word == "--set"]
        found.append(user_input.turned(begun(words[2], None, []), turns))
    assert [getattr(e.strategy, "every", 0) for e in found] == [0, 8, 8, 0]


def example(page: str, word: str) -> str:
    """Returns the one example of a how-to page that contains this word."""
    (found,) = (code for code, _ in howto_pages.examples(HOWTO / f"{page}.md") if word in code)
    return found


def marked(path: Path) -> Any:
    """A how-to page as a parameter. Pages that start a lab need real ranks; most of them are left to `test-long`."""
    starts_lab = any("Lab(ranks=" in code for code, _ in howto_pages.examples(path))
    marks = [pytest.mark.engine if starts_lab else pytest.mark.ranks]
    if starts_lab and path.stem not in ("change_settings_live", "checkpoint_and_resume", "detach_and_attach"):
        marks.append(pytest.mark.long)
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [marked(p) for p in howto_pages.PAGES if howto_pages.examples(p)])
def test_the_examples_of_a_howto_page_print_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for code, shown, printed in howto_pages.run_page(path):
        assert howto_pages.missing_lines(shown, printed) == [], f"{code}\nprinted:\n{printed}"


def test_output_that_a_page_shows_may_differ_in_its_numbers_only() -> None:
    assert howto_pages.missing_lines("rank 1   is lost\n...\n", "a\nrank 23 is lost\n") == []
    assert howto_pages.missing_lines("rank 1 is lost\nb\n", "rank 1 is late\n") == ["rank 1 is lost", "b"]


def test_every_howto_page_but_the_index_is_on_the_index() -> None:
    listed = set(re.findall(r"\((\w+)\.md\)", page("howto/index.md")))
    assert listed == {path.stem for path in howto_pages.PAGES} - {"index"}


@pytest.mark.ranks
def test_the_example_of_a_slow_run_names_who_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    promised = "2. forward, 9 ms per step (11 % of it). Rank 1: its forward takes"
    code = example("find_a_straggler", "advice()")
    exec(code, {})
    assert promised in code and promised in capsys.readouterr().out


def test_the_commands_on_recorded_runs_do_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, pace in (("first", 5.0), ("second", 6.0)):
        simulate(Experiment(ranks=2, steps=200, pace=pace, eval_every=0)).save(tmp_path / "runs" / name)
    for rank in (0, 1):
        shutil.copy(ROOT / "tests" / "recorded" / "torch-2.13" / f"rank-{rank}.json.gz", tmp_path)
    lines = shell_lines("compare_runs", "export_and_traces")
    said = [CliRunner().invoke(app, line.split()[1:]) for line in lines]
    assert [result.exit_code for result in said] == [1, 0, 0, 0], [result.output for result in said]
    assert {"both.html", "theirs.html"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.ranks
def test_the_example_of_a_report_writes_a_page_and_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(example("show_a_run_to_others", "report("), {})
    assert {path.name for path in tmp_path.iterdir()} == {"first.html", "runs"}


@pytest.mark.ranks
def test_the_example_of_a_loop_runs() -> None:
    names: dict[str, Any] = {}
    exec(example("adopt_a_plain_loop", "Loop(run=train)"), names)  # it also runs without ranks
    (session,) = run(replace(names["experiment"], ranks=1))
    assert len(session.record.losses()) == 96


@pytest.mark.ranks
def test_the_example_of_a_script_runs() -> None:
    names: dict[str, Any] = {}
    exec(example("train_your_own_model", "adopt("), names)
    (session,) = run(replace(names["experiment"], ranks=1, eval_every=0))
    losses = session.record.losses()
    assert len(losses) == 100 and sum(losses[-10:]) < sum(losses[:10]) / 2


# -- the glossary


def rows() -> list[list[str]]:
    lines = re.findall(r"^\|(?! ---| here )(.*)\|$", page("reference/glossary.md"), re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch's own imports
def test_the_glossarys_torch_names_exist_in_torch() -> None:
    named = [name for row in rows() for name in re.findall(r"`(torch\.[\w.]+)`", row[2])]
    assert len(named) > 30
    assert all(pkgutil.resolve_name(name) for name in named)
    with pytest.raises(AttributeError):
        pkgutil.resolve_name("torch.distributed.all_shuffle")


def test_the_glossarys_nouns_exist_in_the_workbench() -> None:
    settings = {k.name for m in [Experiment, Fabric, Link, *EVERY] for k in knobs(m)}
    claims = {name for base, _ in reference.FAMILIES.values() for name in vars(base)}
    seen = {word for names, _ in reference.terms(inspect.getdoc(Rank) or "") for word in names.split(", ")}
    verbs = {name for family in reference.list_verb_families() for name in reference.list_family_verbs(family)}
    ours = set(workbench.__all__) | set(dir(tasks)) | set(dir(Rank)) | verbs | seen | settings | claims
    ours |= {"step", "micro"}
    assert all(len(row) == 4 and all(row[:2]) for row in rows())
    assert {name for row in rows() for name in re.findall(r"`(\w+)`", row[0])} - ours == set()


def test_the_glossary_fits_on_two_pages() -> None:
    assert len(page("reference/glossary.md").split()) <= 1200
