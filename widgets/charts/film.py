"""The data to play a recorded run. The page itself advances time (player.js)."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.analysis import list_stretches
from workbench.analysis.steps.settings import with_value
from workbench.settings import in_words

MAX_POINTS = 600  # steps to send; the page interpolates
ELSE = "something else"  # a value that no setting has
ALWAYS = ("strategy", "compressor", "partition", "optimizer", "policy", "lr", "batch", "bucket_mb")


def make_film(run: Any) -> dict[str, Any] | None:
    """Returns `steps` ([seconds, step] of each end on all ranks) and `settings` (`list_settings`).

    None for a live run, or one with fewer than 2 steps.
    """
    rows = run.timeline.spans.rows()
    rows = rows[rows.equal("lane", "step")] if len(rows) else rows
    if run.live or not len(rows) or (first := int(rows.step.min())) == (last := int(rows.step.max())):
        return None
    ended = np.full(last - first + 1, -np.inf)
    np.maximum.at(ended, rows.step - first, rows.t1)
    made = np.flatnonzero(np.isfinite(ended))
    kept = made[np.unique(np.linspace(0, len(made) - 1, MAX_POINTS).astype(int))]
    ends = np.maximum.accumulate(ended[kept])
    steps = [[round(float(t), 6), int(s)] for t, s in zip(ends, kept + first, strict=True)]
    return {"begin": float(rows.t0.min()), "steps": steps, "settings": list_settings(run)}


def list_settings(run: Any) -> list[list[Any]]:
    """Returns `[seconds, step, [[name, words, since], ...]]` for each stretch between changes.

    Lists important settings and those that ever changed. `since`: step of the last change, or null.
    """
    at = {step: t for step, t, _ in reversed(run.details("change"))}
    every = list_stretches(run)
    settings = [_list_knobs(s.settings) for s in every]
    shown = [name for name in settings[0] if name in ALWAYS or any(
        s.get(name) != settings[0][name] for s in settings)]  # fmt: skip
    since: dict[str, int | None] = dict.fromkeys(shown)
    inner: dict[str, list[Any]] = {}  # changed knobs that the record's settings lack
    out: list[list[Any]] = []
    for number, stretch in enumerate(every):
        for name in shown if number else ():
            if settings[number].get(name) != settings[number - 1].get(name):
                since[name] = stretch.first
        if number and stretch.settings == every[number - 1].settings:
            made = [c for c in run.changes if c.at_step == stretch.first]
            inner |= {path: [path, in_words(v), stretch.first] for c in made for path, v in c.settings.items()
                      if with_value(stretch.settings, path, ELSE) == stretch.settings}  # fmt: skip
        told = [[name, in_words(settings[number].get(name)), since[name]] for name in shown]
        out.append([at.get(stretch.first, 0.0) if number else 0.0, stretch.first, told + list(inner.values())])
    return out


def _list_knobs(settings: dict[str, Any]) -> dict[str, Any]:
    """Lists the fabric's knobs one by one, because the whole is too wide for a phone."""
    out = {name: value for name, value in settings.items() if name != "fabric"}
    for name, value in _read_knobs(settings.get("fabric")).items():
        link = {f"link.{inner}": v for inner, v in _read_knobs(value).items()} if name == "link" else {}
        out |= link or {name: value}
    return out


def _read_knobs(plain: Any) -> dict[str, Any]:
    (knobs,) = plain.values() if isinstance(plain, dict) and len(plain) == 1 else ({},)
    return knobs if isinstance(knobs, dict) else {}
