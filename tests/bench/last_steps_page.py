"""Writes the part of docs/project/reliability.md about checkpoints of a run's last step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.last_steps import LAST, MORE, PAIRS, RANKS

ABOUT = f"""`make last-steps` trains {RANKS} ranks for {LAST} steps under each pair of strategy and partition. It
resumes the checkpoint of the last step and makes {MORE} more steps. A pair passes if all losses of these steps are
finite.
"""


def describe(found: dict[str, Any]) -> str:
    """Returns the section's text."""
    if not found:
        return f"{ABOUT}\nNot measured yet.\n"
    every = Counter(one["outcome"] for one in found.values())
    left = f" **{len(PAIRS) - len(found)} pairs are not tried yet.**" if len(found) < len(PAIRS) else ""
    lines = [ABOUT, f"{len(found)} pairs: {every['resumed']} resumed, {every['refused']} cannot train or make no "
                    f"checkpoint at their last step, {every['wrong']} wrong.{left}\n"]  # fmt: skip
    wrong = [f"- {name}: {one['why'].strip().splitlines()[-1][:200]}" for name, one in found.items()
             if one["outcome"] == "wrong"]  # fmt: skip
    return "\n".join([*lines, *wrong, *([""] if wrong else [])])
