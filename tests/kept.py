"""Runs that make checkpoints, runs that resume one, and comparisons, on both hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.ranks import assemble, ended, experiment, live, mse, require_no_error, toy
from tests.sim.virtual import samples
from workbench import simulate
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.record.checkpoints import FOLDER, Checkpoint, list_checkpoints
from workbench.run import Run
from workbench.settings import Change


def simulated(ranks: int, steps: int, folder: Path, every: int = 0, resume: Checkpoint | None = None,
              changes: tuple[Change, ...] = (), **rest: Any) -> tuple[Run, list[torch.Tensor]]:  # fmt: skip
    """Simulates a run with real tensors and checkpoints in `folder`. Returns it with every rank's last parameters."""
    models: dict[int, nn.Module] = {}

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        first = next(model.parameters())
        if model.training and not first.is_meta and not hasattr(first, "fake_mode"):  # those only predict
            models[id(model)] = model
        return mse(model, pair)

    e = experiment(ranks, steps, **{"task": toy(loss=loss), "pace": 5.0, "save_every": every, **rest})
    done = simulate(e, changes=changes, real=True, resume=resume, checkpoints=folder)
    named = [sorted(m.named_parameters()) for m in models.values()]
    return done, [torch.cat([p.detach().reshape(-1).double() for _, p in params]) for params in named]


def losses(run: Run, ranks: int, since: int = 0) -> list[list[float]]:
    """Returns losses by rank, from step `since` on."""
    rows = run.timeline.samples.rows()
    rows = rows[rows.step >= since]
    assert len(samples(run, "loss"))
    return [rows[rows.equal("name", "loss") & (rows.rank == r)].value.tolist() for r in range(ranks)]


def lived(e: Experiment, folder: Path, resume: Path | str = "", changes: tuple[Change, ...] = ()) -> list[Session]:
    """Makes a run on threads in a separate run directory."""
    folder.mkdir(parents=True)
    sessions = live(e, changes, run_dir=folder, resume=str(resume))
    ended(sessions)
    require_no_error(sessions)
    return sessions


def held(sessions: list[Session]) -> list[dict[str, torch.Tensor]]:
    """Returns each rank's parameters."""
    assemble(sessions)
    return [{place.name: place.param.detach().clone() for place in s.layout.order} for s in sessions]


def twice(e: Experiment, folder: Path, at: int) -> tuple[list[Session], list[Session]]:
    """Makes a run with checkpoints every `at` steps, and one that resumes its first."""
    whole = lived(replace(e, save_every=at), folder / "whole")
    first = list_checkpoints(folder / "whole" / FOLDER)[0]
    return whole, lived(replace(e, save_every=at), folder / "rest", first)


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    """Returns whether both are bit-identical."""
    return all(x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
               for x, y in zip(one, other, strict=True))  # fmt: skip
