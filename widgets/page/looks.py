"""A dashboard's state as plain JSON: open, chosen and pinned items, but not the run.

    {"version": 1,
    "tables": ["loss"],            views with an open data table
    "rank": 2,                     the rank with highlighted curves, or null
    "pin": {...},                  the pinned box of the timeline, or null
    "theme": "dark",               "light", "dark", or "" for the page's own
    "at": 120, "steps": 4,         the first step (null: follows the run), number of steps (null: automatic)
    "groups": ["link"],            unfolded groups of controls; "ranks": single ranks
    "what_if": {"open": true, "ranks": 8, "bandwidth": 100.0, "latency": 0.5}}    Mbit/s (0: unlimited), ms

`read_state` returns it. `restore_state` applies it.
"""

from __future__ import annotations

import json
from typing import Any

from widgets.controls.what_if import slider_bandwidth, slider_position
from workbench.settings import KnobError, short

VERSION = 1
MEMBERS = "ranks"  # the group of single ranks
KINDS: dict[str, tuple[type, ...]] = {
    "tables": (list,), "rank": (int, type(None)), "pin": (dict, type(None)), "theme": (str,),
    "at": (int, type(None)), "steps": (int, type(None)), "groups": (list,), "what_if": (dict,),
}  # fmt: skip


def read_state(dashboard: Any) -> dict[str, Any]:
    """Returns a Dashboard's state, as described above."""
    looks, window, panel = dashboard.board.looks, dashboard.board.window, dashboard.what_if
    groups = [name for part in dashboard.handles for name in _open_groups(part)]
    asked = {
        "ranks": panel.ranks.value,
        "bandwidth": slider_bandwidth(panel.bandwidth.value),
        "latency": panel.latency.value,
    }
    return {
        "version": VERSION,
        "tables": list(looks.get("tables", [])), "rank": looks.get("rank"), "pin": looks.get("pin"),
        "theme": looks.get("theme") or "", "at": window.get("at"), "steps": window.get("steps"), "groups": groups,
        "what_if": {"open": dashboard.fold.selected_index == 0, **asked},
    }  # fmt: skip


def restore_state(dashboard: Any, state: dict[str, Any] | str) -> None:
    """Applies `state`. Parts that it lacks stay. Raises KnobError."""
    said = _check_state(state)
    looks = {k: said[k] for k in ("tables", "rank", "pin", "theme") if k in said}
    window = {k: said[k] for k in ("at", "steps") if k in said}
    dashboard.board.look({**dashboard.board.looks, **looks}, {**dashboard.board.window, **window})
    for part in dashboard.handles if "groups" in said else ():
        if isinstance(getattr(part, "opened", None), bool):
            part.opened = MEMBERS in said["groups"]
        elif hasattr(part, "opened"):
            part.opened = [name for name in said["groups"] if name != MEMBERS]
    if asked := said.get("what_if"):
        panel = dashboard.what_if
        panel.set_fixed(
            asked.get("ranks", panel.ranks.value),
            slider_position(asked["bandwidth"]) if "bandwidth" in asked else panel.bandwidth.value,
            asked.get("latency", panel.latency.value),
        )
        dashboard.fold.selected_index = 0 if asked.get("open") else None


def _open_groups(part: Any) -> list[str]:
    opened = getattr(part, "opened", [])
    return ([MEMBERS] if opened else []) if isinstance(opened, bool) else list(opened)


def _check_state(state: dict[str, Any] | str) -> dict[str, Any]:
    try:
        said = json.loads(state) if isinstance(state, str) else state
    except ValueError:
        raise KnobError(f"state={short(state)}: must be JSON text as state() returns it") from None
    if not isinstance(said, dict) or said.get("version") != VERSION:
        raise KnobError(f"state={short(said)}: must be a dict as state() returns it, with version {VERSION}")
    for name, kinds in KINDS.items():
        if name in said and (not isinstance(said[name], kinds) or isinstance(said[name], bool)):
            raise KnobError(f"state {name}={short(said[name])}: must have the type that state() returns")
    if said.get("theme", "") not in ("", "light", "dark"):
        raise KnobError(f"state theme={short(said['theme'])}: must be 'light', 'dark' or '' (the page's own)")
    asked = said.get("what_if", {})
    numbers = (asked.get(k, 0) for k in ("ranks", "bandwidth", "latency"))
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < 1e9 for x in numbers):
        raise KnobError(f"state what_if={short(asked)}: ranks, bandwidth and latency must be numbers >= 0")
    return said
