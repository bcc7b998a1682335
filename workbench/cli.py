"""The command line: `workbench lab | demo | run | tune | show | what-if | compare | export | open | course`.

A user's mistake prints one sentence. Commands import heavy packages themselves, so `workbench show` needs no torch.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.run.rank_errors import RankError
from workbench.run import Run, RunError
from workbench.settings import KnobError

RECIPE_HELP = "a recipe, such as first_run, digits or slow_link, or a training script, such as train.py"
POLL_INTERVAL = 0.2  # seconds between two looks at a script's output

app = typer.Typer(
    help="Watch and steer distributed training while it runs.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
course = typer.Typer(help="Teach a class: a hand-out of the lessons, and marks.", no_args_is_help=True)
app.add_typer(course, name="course")


def plainly(command: Callable[..., None]) -> Callable[..., None]:
    """Turns an error into one sentence. The exit code is 2 for a user's error and 1 for a rank's."""

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
    from workbench.entrypoints import jupyter

    jupyter.open_lab(port, browser)


@app.command()
@plainly
def demo(
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("demo.html"),
    ranks: Annotated[int, typer.Option(help="how many ranks train")] = 4,
    seconds: Annotated[float, typer.Option(help="approximate training time", min=5)] = 60.0,
) -> None:
    """Train on a slow link, switch strategy and compressor live and print the effect of each change."""
    from workbench.entrypoints.demo import run_tour

    run_tour(out, ranks, seconds)


@app.command()
@plainly
def run(
    out: Annotated[Path, typer.Option(help="the run directory that is written")],
    recipe: Annotated[str | None, typer.Argument(help=RECIPE_HELP)] = None,
    words: Annotated[list[str] | None, typer.Argument(help="after --, the arguments of the script")] = None,
    knobs: Annotated[list[str] | None, typer.Option("--set", help="a knob as path=value (repeatable)")] = None,
    steps: Annotated[int | None, typer.Option(help="stop after this many steps (200 if the recipe sets none)")] = None,
    ranks: Annotated[int | None, typer.Option(help="how many ranks train")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="resume from this checkpoint, or from the newest one of this run")
    ] = None,
) -> None:
    """Run a recipe or a training script without a browser and record it, or go on from a checkpoint.

    A script, such as train.py, is one that torchrun could start. Its DistributedDataParallel is torch's own (TorchDDP),
    or that of --set strategy=DDP, LocalSGD, ... It ends by itself, or after --steps. Its arguments come after --, as
    in: workbench run train.py --ranks 2 --out runs/mine -- --epochs 3
    """
    from workbench.experiment import user_input

    user_input.ranks(4 if ranks is None else ranks)
    asked = [*map(setting, knobs or ()), ("steps", steps), ("ranks", ranks)]
    start = begun(recipe, resume, words or [])
    experiment = user_input.turned(start, [(path, value) for path, value in asked if value is not None])
    experiment = experiment if experiment.steps or experiment.task.has_own_loop else experiment.set("steps", 200)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out}: already exists; name a new directory")
    from workbench.entrypoints.termination import EXIT_CODE, describe_end, handle_sigterm
    from workbench.lab import Lab

    with handle_sigterm() as ending:
        with_lab = Lab(ranks=experiment.ranks, name=f"run-{out.resolve().name}")
        with_lab.cluster.renewal.starts_ahead = False  # because no other run follows
        try:
            done = with_lab.run(experiment, out=out, resume=resume)
            ending.lab = with_lab
            followed(done) if experiment.task.has_own_loop else done.wait()
            print_summary(done)
        finally:
            with_lab.close()
            if ending.times and out.is_dir():
                typer.echo(f"workbench: {describe_end(out)}", err=True)
    if ending.times and done.state != "done":
        raise typer.Exit(EXIT_CODE)
    if done.state in ("preempted", "failed"):
        raise typer.Exit(1)


@app.command()
@plainly
def tune(
    recipe: Annotated[str, typer.Argument(help="a recipe, such as first_run, digits or slow_link")],
    tried: Annotated[list[str] | None, typer.Option("--try", help="a knob and a JSON list of its values")] = None,
    knobs: Annotated[list[str] | None, typer.Option("--set", help="a knob as path=value (repeatable)")] = None,
    trials: Annotated[int | None, typer.Option(help="how many settings are tried")] = None,
    worse: Annotated[float, typer.Option(help="share by which the loss may lie above its trend")] = 0.02,
    ranks: Annotated[int, typer.Option(help="how many ranks train")] = 4,
    out: Annotated[Path | None, typer.Option(help="the run directory that is written")] = None,
) -> None:
    """Train a recipe, try settings while it trains and print the settings with the shortest step."""
    from workbench.entrypoints.tuning import tune_run
    from workbench.experiment import user_input

    user_input.ranks(ranks)
    asked = [*map(setting, knobs or ()), ("ranks", ranks), ("steps", 0)]
    space = dict(map(setting, tried or ())) or None
    tune_run(user_input.turned(begun(recipe, None, []), asked), space, trials, worse, out)


@app.command()
@plainly
def show(
    rundir: Annotated[Path, typer.Argument(help="a run directory")],
    out: Annotated[Path | None, typer.Option(help="also write the charts into this page")] = None,
) -> None:
    """Print the summary of a recorded run. With --out write its charts as one HTML page."""
    found = Run.open(rundir)
    print_summary(found)
    if out:
        from workbench.entrypoints.report import write_page

        typer.echo(f"wrote {write_page(found, out)}")


@app.command("what-if")
@plainly
def what_if(
    rundir: Annotated[str, typer.Argument(help="a run directory; runs/first@100:200 are its steps 100 to 199")],
    knobs: Annotated[list[str] | None, typer.Option("--set", help="a knob as path=value (repeatable)")] = None,
    network: Annotated[str, typer.Option(help="a network in place of the run's, such as 100 GbE")] = "",
    ranks: Annotated[list[int] | None, typer.Option(help="number of ranks (repeatable: a row for each)")] = None,
    over: Annotated[bool, typer.Option("--over", help="a row for each of 2, 4, 8, ... 4,096 ranks")] = False,
) -> None:
    """Predict a recorded run under other settings, networks and numbers of ranks with the simulator."""
    found, settings, some = opened(rundir), dict(map(setting, knobs or ())), ranks or []
    try:
        if over or len(some) > 1:
            text = repr(found.scaling(settings, network, some or None))
        else:
            told = found.what_if(settings | ({"ranks": some[0]} if some else {}), network)
            text = "\n".join([repr(told), *(f"- {assumed}" for assumed in told.assumptions)])
    except ValueError as error:  # no step to measure costs from
        raise RunError(str(error)) from None
    typer.echo(text)


@app.command()
@plainly
def compare(
    a: Annotated[str, typer.Argument(help="a run directory; runs/first@100:200 are its steps 100 to 199")],
    b: Annotated[str, typer.Argument(help="another run directory, or another segment of the same run")],
    metric: Annotated[
        str | None, typer.Option(help="only metrics whose name begins with this: step, exposed, bytes, loss")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="share of a's value by which b may be worse", min=0, max=10)] = 0.0,
    out: Annotated[Path | None, typer.Option(help="also write the overlaid curves into this page")] = None,
) -> None:
    """Compare two recorded runs; exit code 1 if b is worse in a metric (99 % confidence, tolerance)."""
    from workbench.entrypoints.run_comparison import print_comparison

    if print_comparison(opened(a), opened(b), metric, tolerance, out):
        raise typer.Exit(1)


@app.command()
@plainly
def export(
    rundir: Annotated[str, typer.Argument(help="a run directory; runs/first@100:200 are its steps 100 to 199")],
    to: Annotated[str, typer.Option(help="perfetto, chrome, parquet, csv or tensorboard")],
    out: Annotated[Path | None, typer.Option(help="the file or folder to write")] = None,
) -> None:
    """Write a recorded run for another tool."""
    typer.echo(f"wrote {opened(rundir).export(to, out)}")


@app.command("open")
@plainly
def open_traces(
    traces: Annotated[list[Path], typer.Argument(help="files of torch.profiler, .json or .json.gz, one per rank")],
    save: Annotated[Path | None, typer.Option(help="also save them as this run directory")] = None,
    out: Annotated[Path | None, typer.Option(help="also write the charts into this page")] = None,
) -> None:
    """Read traces of another job and print its timeline, overlaps and waits."""
    from workbench.entrypoints.trace_summary import summarise_traces

    found = Run.from_traces(traces)
    print_summary(found)
    for text in [*summarise_traces(found), *found.warnings]:
        typer.echo(f"  {text}")
    if save:
        typer.echo(f"kept {found.save(save)}")
    if out:
        from workbench.entrypoints.report import write_page

        typer.echo(f"wrote {write_page(found, out)}")


@course.command("export")
@plainly
def export_lessons(
    lessons: Annotated[list[str] | None, typer.Argument(help="numbers of lessons, such as 05 06; none: all")] = None,
    to: Annotated[Path, typer.Option(help="a new folder")] = Path("handout"),
    slides: Annotated[bool, typer.Option(help="also make slides")] = True,
    notebooks: Annotated[
        Path | None, typer.Option(help="a folder with your copies of the lessons, whose outputs the slides show")
    ] = None,
) -> None:
    """Write a hand-out for a class: notebooks, slides, answers.json and a README for the teacher."""
    from workbench.entrypoints.course import export_course

    for path in export_course(lessons or (), to, slides, notebooks):
        typer.echo(f"wrote {path}")


@course.command("mark")
@plainly
def mark_worksheets(
    folder: Annotated[Path, typer.Argument(help="the folder with the students' worksheets or notebooks")],
    answers: Annotated[Path | None, typer.Option(help="the answers.json of the hand-out")] = None,
    out: Annotated[Path | None, typer.Option(help="also write the table as this CSV file")] = None,
) -> None:
    """Print a table of marks: a row for each student, a column for each question."""
    from workbench.entrypoints.course import mark_course

    typer.echo(mark_course(folder, answers, out))


def opened(text: str) -> Run:
    """Returns the run in a run directory. For `runs/first@100:200` it has steps 100 to 199."""
    part = None if Path(text).exists() else re.fullmatch(r"(.+)@([0-9]{1,9}):([0-9]{1,9})", text)
    return Run.open(part[1]).segment(int(part[2]), int(part[3])) if part else Run.open(text)


def begun(recipe: str | None, resume: Path | None, words: list[str]) -> Any:
    """Returns the experiment of a recipe, a script or a checkpoint. Settings apply to it."""
    from workbench.experiment.recipes import recipe as find

    if (recipe is None) == (resume is None):
        raise KnobError("run: name a recipe (digits), a script (train.py) or a checkpoint "
        "with --resume")  # fmt: skip
    if recipe is not None and recipe.endswith(".py"):
        from workbench.experiment import user_input

        return user_input.script(recipe, words)
    if words:
        raise KnobError(f"run: {recipe or resume} takes no arguments; only a script does: {' '.join(words)}")
    if recipe is not None:
        return find(recipe)
    from workbench.run import settings_of

    return settings_of(resume or "")


def followed(run: Run) -> None:
    """Waits for the end of a script's run and prints the output of its rank 0."""
    told, live = 0, True
    while live:
        live = run.live  # before it reads the lines, because the last lines exist once the run is over
        lines = run.details("log", rank=0)
        for _, _, line in lines[told:]:
            typer.echo(line["text"].rstrip("\n"), err=line["stream"] == "stderr")
        told = len(lines)
        time.sleep(POLL_INTERVAL if live else 0.0)
    run.wait()


def setting(text: str) -> tuple[str, Any]:
    """Returns `path=value` as (path, value). Reads the value as JSON, else as a word.

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
    """Prints one line per value of a run's summary."""
    typer.echo(repr(run))
    for name, value in run.summary().items():
        typer.echo(f"  {name:<28} {value:.4g}" if isinstance(value, float) else f"  {name:<28} {value}")


if __name__ == "__main__":
    app()
