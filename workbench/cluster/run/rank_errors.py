"""Joins the ranks' errors into one that names rank, step and operation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from workbench.settings import KnobError

_LOST_PEER_TEXTS = (
    "onnection closed", "onnection reset", "onnection refused", "roken pipe", "ead error", "rite error",
    "pair closure", "ocket closed", "ocket Timeout", "did not finish", "left a collective", "imed out",
)  # fmt: skip
_KNOB_ERROR = KnobError.__name__  # a rank's type for a refused setting


class RankError(RuntimeError):
    """A rank failed. `rank`, `step`, `op`, `type`, `text` and `traceback` describe the cause.

    ranks:  the ranks with the same failure
    freed:  the ranks that only lost their peer
    all:    every error as plain values

    What to do: read `type`, `text` and `traceback`, which come from the rank. Resume from the newest checkpoint.
    """

    def __new__(cls, errors: Sequence[dict[str, Any]]) -> RankError:
        made = RankRefusal if cls is RankError and fold_errors(errors)[0]["type"] == _KNOB_ERROR else cls
        return super().__new__(made)

    def __init__(self, errors: Sequence[dict[str, Any]]) -> None:
        self.all = list(errors)
        first, same, freed = fold_errors(errors)
        self.rank, self.step, self.op = int(first["rank"]), int(first["step"]), str(first["op"])
        self.type, self.text, self.traceback = first["type"], first["text"], first.get("traceback", "")
        self.ranks, self.freed = same, freed
        super().__init__(self._make_sentence())

    def _make_sentence(self) -> str:
        where = f"{_format_rank_ranges(self.ranks)}, step {self.step}" + (f", {self.op}" if self.op else "")
        text = f"{where}: {self.type}: {self.text}"
        if self.freed:
            text += (
                f" ({_format_rank_ranges(self.freed)} {'was' if len(self.freed) == 1 else 'were'} freed because of it)"
            )
        if line := _find_user_line(self.traceback):
            text += f"\n    {line}"
        return text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": f"{type(self).__name__}: {self}"}


class RankRefusal(RankError, KnobError):
    """A rank refused a setting that only it could check, such as one that does not fit its model.

    What to do: as for a KnobError. The message has the range or an alternative.
    """


def fold_errors(errors: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[int], list[int]]:
    """Returns (the cause, ranks with the same failure, its victims)."""
    causes = [e for e in errors if not is_consequence(e)] or list(errors)
    first = min(causes, key=lambda e: (e["type"] != "EngineDied", e.get("t", 0.0), e["rank"]))
    same = sorted({int(e["rank"]) for e in causes if (e["type"], e["text"]) == (first["type"], first["text"])})
    freed = sorted({int(e["rank"]) for e in errors if is_consequence(e)} - set(same))
    return first, same, freed


def align_death_steps(errors: dict[int, dict[str, Any]], experiment: Any) -> None:
    """Advances a dead rank's step to the one that the other ranks missed it in, if all meet in every step.

    Its own last report may be older.
    """
    rule = experiment.strategy
    together = rule.lockstep and not rule.periodic and not rule.propagation(experiment.ranks)
    missed = max((e["step"] for e in errors.values() if is_consequence(e)), default=0)
    for error in errors.values():
        if together and error["type"] == "EngineDied" and error["step"] < missed:
            error.update(step=missed, op="")


def explain_lost_state(errors: dict[int, dict[str, Any]], members: Collection[int], joining: Sequence[int],
               checkpoint: str) -> None:  # fmt: skip
    """If all `members` died, adds to their errors that no rank holds the trained state, and what to do.

    joining: ranks still receiving the state; checkpoint: the newest one's path, or ""
    """
    dead = {rank for rank, error in errors.items() if error["type"] == "EngineDied"}
    if not members or not dead.issuperset(members):
        return
    text = "no rank that is left holds the trained state"
    if joining:
        text += f" ({_format_rank_ranges(joining)} {'was' if len(joining) == 1 else 'were'} still joining)"
    text += f"; go on from the newest checkpoint with lab.run(resume={checkpoint!r})" if checkpoint else (
        "; there is no checkpoint to go on from, take save_every=100")  # fmt: skip
    for rank in dead.intersection(members):
        if text not in errors[rank]["text"]:
            errors[rank]["text"] += f"; {text}"


def is_consequence(error: dict[str, Any]) -> bool:
    """Whether an error only reports a lost peer."""
    if error.get("own"):
        return False
    return bool(error.get("consequence")) or any(w in str(error["text"]) for w in _LOST_PEER_TEXTS)


def _format_rank_ranges(ranks: Iterable[int]) -> str:
    """Names ranks: `rank 2`, `ranks 0-3`, `ranks 0, 2`."""
    every = sorted(ranks)
    if len(every) == 1:
        return f"rank {every[0]}"
    if every == list(range(every[0], every[-1] + 1)) and len(every) > 2:
        return f"ranks {every[0]}-{every[-1]}"
    return "ranks " + ", ".join(map(str, every))


def _find_user_line(traceback: str) -> str:
    """Returns a traceback's last line in the user's code, or else its last."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip().startswith("File ")]
    own = [x for x in lines if not any(part in x for part in ("/workbench/", "/torch/", "/threading.py"))]
    return (own or lines or [""])[-1]
