"""Tests the shipped files: metadata, constraints, the contents of a wheel, and set-up scripts."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, entry_points, metadata
from itertools import product
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests import badges, packages, run_all

ROOT = Path(__file__).parent.parent.parent
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[;, ]", r)[0].lower().replace("_", "-") for r in requirements}


def test_every_requirement_is_pinned() -> None:
    pinned = names([line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")])
    asked = names(ABOUT["project"]["dependencies"])
    for extra in ABOUT["project"]["optional-dependencies"].values():
        asked |= names(extra)
    assert asked - pinned <= {"training-workbench"}


def test_every_pin_supports_the_oldest_promised_python() -> None:
    """An old pip gives no clear error: it tries one version of everything after another, for hours."""
    oldest = ABOUT["project"]["requires-python"].removeprefix(">=") + ".0"
    known, newer = 0, []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        try:
            about = metadata(name)
        except (PackageNotFoundError, ValueError):  # a package of another platform, or the file's first line
            continue
        if about["Version"].split("+")[0] == version:
            known += 1
            newer += [] if SpecifierSet(about.get("Requires-Python", "")).contains(oldest) else [line]
    assert oldest == "3.11.0" and known > 100 and not newer


def test_torch_is_pinned_without_naming_a_build() -> None:
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    assert "@" not in (ROOT / "constraints.txt").read_text()


def test_the_version_is_written_once_in_each_place_and_the_same() -> None:
    import workbench

    version = ABOUT["project"]["version"]
    assert workbench.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_entry_points_are_installed_and_load() -> None:
    found = {e.name: e.load() for e in entry_points(group="workbench.display")}
    assert set(found) == {"Lab", "Run", "report", "handout", "marks"}
    assert all(callable(f) for f in found.values())
    assert any(e.value == "workbench.cli:app" for e in entry_points(group="console_scripts"))


@pytest.mark.parametrize("script", ["setup.sh", ".ci/run", "binder/postBuild"])
def test_a_script_is_executable_and_its_shell_can_read_it(script: str) -> None:
    path = ROOT / script
    shell = "bash" if "bash" in path.read_text().splitlines()[0] else "sh"
    assert path.stat().st_mode & 0o111
    assert subprocess.run([shell, "-n", str(path)], check=False).returncode == 0


def test_make_has_the_targets_of_the_readme() -> None:
    said = subprocess.run(["make", "-n", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("lab", "demo", "test", "bench"):
        assert f"make {target} " in said


def test_the_badges_agree_with_the_metadata_and_load_from_no_host() -> None:
    drawn = badges.badges()
    assert {p.stem: p.read_text() for p in badges.FOLDER.iterdir()} == drawn, "python -m tests.tables"
    assert ABOUT["project"]["license"] in drawn["licence"] and "3.11 or newer" in drawn["python"]
    shown = re.findall(r"\[!\[[^\]]+\]\(([^)]+)\)\]", (ROOT / "README.md").read_text())
    assert sorted(shown) == sorted(f"docs/badges/{name}.svg" for name in drawn)


def test_binder_opens_the_first_lesson_of_the_cloned_repository() -> None:
    link = runpy.run_path(str(ROOT / "binder" / "link.py"))["link"]
    lesson = "HEAD?urlpath=lab%2Ftree%2Fnotebooks%2F01_first_run.ipynb"
    for origin in ("https://github.com/some/where.git", "git@github.com:some/where.git"):
        assert link(origin) == f"https://mybinder.org/v2/gh/some/where/{lesson}"
    elsewhere = "https://mybinder.org/v2/git/https%3A%2F%2Fgit.some.org%2Fa%2Fb"
    assert link("https://me:secret@git.some.org/a/b") == f"{elsewhere}/{lesson}"
    assert (ROOT / "notebooks" / "01_first_run.ipynb").exists()
    for nowhere in ("", "/home/me/clone", "file:///srv/clone"):
        with pytest.raises(ValueError, match="not cloned from an address"):
            link(nowhere)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_installed_wheel_runs_the_quickstart_and_finds_its_notebooks(tmp_path: Path) -> None:
    wheel = packages.build_wheel(tmp_path)
    held = set(zipfile.ZipFile(wheel).namelist())
    for package in ("workbench", "widgets"):
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".js", ".css", ".md") and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in held
    versions = packages.try_environment(tmp_path, wheel, packages.find_pinned_torch())
    assert versions.split()[1].startswith(packages.find_pinned_torch())


# Promises to `make test` and to the forge.


def test_every_test_belongs_to_exactly_one_group_of_make_test() -> None:
    marks = [g for g in run_all.GROUPS if g != "quick"]
    assert set(marks) == {line.split(":")[0] for line in ABOUT["tool"]["pytest"]["ini_options"]["markers"]}
    for chosen in product((True, False), repeat=len(marks)):
        carried = dict(zip(marks, chosen, strict=True))
        homes = [g for g in run_all.GROUPS if eval(run_all.expression(g), {}, carried)]
        assert len(homes) == 1


def test_skipped_tests_are_listed_with_group_and_reason_before_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="no"/></testcase>'
        '<testcase name="c"><skipped message="no NVIDIA GPU"/></testcase></testsuite></testsuites>'
    )
    outcome = run_all.read("gpu", 1, tmp_path / "report.xml")
    assert outcome.counts == {"passed": 1, "failed": 1, "skipped": 1}
    monkeypatch.setenv("WORKBENCH_SKIPPED", str(tmp_path / "skipped"))
    run_all.close(outcome.counts, outcome.skipped, 61.0)
    said = capsys.readouterr().out.splitlines()
    assert "  gpu (1): no NVIDIA GPU" in said
    assert said[-1] == "===== 1 failed, 1 passed, 1 skipped in 61.00s (00:01:01) ====="
    assert (tmp_path / "skipped").read_text() == "gpu\t1\tno NVIDIA GPU\n"


def test_a_pytest_that_died_counts_as_an_error(tmp_path: Path) -> None:
    outcome = run_all.read("engine", -6, tmp_path / "none.xml")
    assert outcome.code == -6
    assert outcome.counts["error"] == 1


def test_make_lab_installs_the_dock_extras_after_any_other_target(tmp_path: Path) -> None:
    """`make lab` treats an environment made by `make docs` or `make test` as installed."""
    for target in (".installed", ".installed-docs", ".installed-dev", ".installed-test"):
        done = subprocess.run(["make", "-n", f"VENV={tmp_path}", f"{tmp_path}/{target}"], cwd=ROOT, capture_output=True,
                              text=True, check=True)  # fmt: skip
        (asked,) = [line for line in done.stdout.splitlines() if line.startswith("./setup.sh")]
        extras = set(asked.split()[2].split(","))
        assert "dock" in extras and extras >= set(target.split("-")[1:])


def test_an_environment_is_updated_if_the_makefile_has_changed(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".installed"):
        (tmp_path / name).touch()
    ask = ["make", "-q", f"VENV={tmp_path}", f"{tmp_path}/.installed"]
    assert subprocess.run(ask, cwd=ROOT, check=False).returncode == 0
    assert subprocess.run([*ask, "-W", "Makefile"], cwd=ROOT, check=False).returncode == 1
