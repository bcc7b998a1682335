"""The command line: `workbench lab | demo | run | show`. A mistake is answered with one sentence.

Heavy packages are imported inside the commands that need them, so that `workbench show` needs no torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cluster.errors import RankError
from workbench.cluster.place import ClusterError
from workbench.run import Run, RunError
from workbench.settings import KnobError

app = typer.Typer(
    help="Watch and steer distributed training while it runs.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


def plainly(command: Callable[..., None]) -> Callable[..., None]:
    """What a person can put right is said in a sentence, with exit code 2; what a rank died of, with 1."""

    @functools.wraps(command)
    def said(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (KnobError, RunError, ClusterError, RankError) as error:
            typer.echo(f"workbench: {error}", err=True)
            raise typer.Exit(1 if isinstance(error, RankError) else 2) from None

    return said


@app.command()
@plainly
def lab(
    port: Annotated[int, typer.Option(help="Jupyter's port; if in use, the next free one", min=1, max=65535)] = 8888,
    browser: Annotated[bool, typer.Option(help="open a browser")] = True,
) -> None:
    """Open JupyterLab on the first notebook."""
    from workbench.doors import jupyter

    jupyter.open_lab(port, browser)


@app.command()
@plainly
def demo(
    out: Annotated[Path, typer.Option(help="the page that is written")] = Path("demo.html"),
    ranks: Annotated[int, typer.Option(help="how many ranks train")] = 4,
    seconds: Annotated[float, typer.Option(help="how long they train, about", min=5)] = 60.0,
) -> None:
    """Train on a slow wire, switch strategy and compressor live, and say what each change did."""
    from workbench.doors.demo import tour

    tour(out, ranks, seconds)


@app.command()
@plainly
def run(
    out: Annotated[Path, typer.Option(help="the run directory that is written")],
    recipe: Annotated[str | None, typer.Argument(help="a recipe, such as first_run, digits or slow_link")] = None,
    knobs: Annotated[list[str] | None, typer.Option("--set", help="a knob, as path=value; may be given again")] = None,
    steps: Annotated[int | None, typer.Option(help="stop after so many steps (200 if the recipe does not say)")] = None,
    ranks: Annotated[int | None, typer.Option(help="how many ranks train")] = None,
    resume: Annotated[Path | None, typer.Option(help="go on from this checkpoint, or the newest of this run")] = None,
) -> None:
    """Run a recipe without a browser and record it, or go on from a checkpoint, with other settings if you like."""
    from workbench.experiment import given

    given.ranks(4 if ranks is None else ranks)
    asked = [*map(setting, knobs or ()), ("steps", steps), ("ranks", ranks)]
    start = begun(recipe, resume)
    experiment = given.turned(start, [(path, value) for path, value in asked if value is not None])
    experiment = experiment if experiment.steps else experiment.set("steps", 200)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out}: is there already; name a directory that is new")
    from workbench.doors.ending import CODE, how, told
    from workbench.lab import Lab

    with told() as ending:
        with_lab = Lab(ranks=experiment.ranks, name=f"run-{out.resolve().name}")
        try:
            done = with_lab.run(experiment, out=out, resume=resume)
            ending.lab = with_lab
            done.wait()
            print_summary(done)
        finally:
            with_lab.close()
            if ending.times and out.is_dir():
                typer.echo(f"workbench: {how(out)}", err=True)
    if ending.times and done.state != "done":
        raise typer.Exit(CODE)
    if done.state == "failed":
        raise typer.Exit(1)


@app.command()
@plainly
def show(
    rundir: Annotated[Path, typer.Argument(help="a run directory")],
    out: Annotated[Path | None, typer.Option(help="also write the charts into this page")] = None,
) -> None:
    """Print what a recorded run came to; with --out, write its charts as one HTML page."""
    found = Run.open(rundir)
    print_summary(found)
    if out:
        from workbench.doors.report import write_page

        typer.echo(f"wrote {write_page(found, out)}")


def begun(recipe: str | None, resume: Path | None) -> Any:
    """The experiment that settings are set in: a recipe's, or a checkpoint's."""
    from workbench.experiment.recipes import recipe as find

    if (recipe is None) == (resume is None):
        raise KnobError("run: name a recipe, such as digits, or a checkpoint with --resume; and not both")
    if recipe is not None:
        return find(recipe)
    from workbench.run import settings_of

    return settings_of(resume or "")


def setting(text: str) -> tuple[str, Any]:
    """`path=value` as (path, value); the value is read as JSON if it is JSON, and as a word if not.

    >>> setting("strategy.every=8"), setting("strategy=LocalSGD")
    (('strategy.every', 8), ('strategy', 'LocalSGD'))
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise KnobError(f"--set {text}: must be path=value, such as strategy.every=8")
    try:
        return path, json.loads(value)
    except json.JSONDecodeError:
        return path, value


def print_summary(run: Run) -> None:
    """One line per value of a run's summary."""
    typer.echo(repr(run))
    for name, value in run.summary().items():
        typer.echo(f"  {name:<28} {value:.4g}" if isinstance(value, float) else f"  {name:<28} {value}")


if __name__ == "__main__":
    app()
