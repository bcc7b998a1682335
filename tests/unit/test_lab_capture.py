"""Tests the capture of output, warnings and logs by thread."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.cluster.transport import output_capture
from workbench.cluster.transport.output_capture import OutputCapture


def run_as(name: str, what: Callable[[], object]) -> None:
    thread = threading.Thread(target=what, name=name)
    thread.start()
    thread.join()


def speak() -> None:
    print("one\ntwo", end="")
    print("", flush=True)
    print("three", file=sys.stderr)
    logging.getLogger("some").warning("four")
    warnings.warn("five", UserWarning, stacklevel=1)


def test_only_output_of_training_threads_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[tuple[str, str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with OutputCapture("rank ", lambda stream, text: said.append((stream, text))):
            run_as("rank 0 training", speak)
            run_as("MainThread", lambda: print("a cell's own words"))
            run_as("rank 0 recorder", lambda: print("not the training's"))
    plain = [(stream, text.split(" (")[0]) for stream, text in said]
    assert plain == [("stdout", "one"), ("stdout", "two"), ("stderr", "three"), ("log", "WARNING some: four"),
                     ("warning", "UserWarning: five")]  # fmt: skip
    assert capsys.readouterr().out == "a cell's own words\nnot the training's\n"


def test_all_hooks_are_restored() -> None:
    before = sys.stdout, sys.stderr, warnings.showwarning, list(logging.getLogger().handlers)
    with OutputCapture("rank ", lambda *said: None):
        assert sys.stdout is not before[0]
    assert (sys.stdout, sys.stderr, warnings.showwarning, list(logging.getLogger().handlers)) == before


def test_a_flood_of_output_is_counted_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    second = [1.0]
    monkeypatch.setattr(output_capture.time, "monotonic", lambda: second[0])
    with OutputCapture("rank ", lambda stream, text: said.append(text)) as ours:
        run_as("rank 0 training", lambda: [print(i) for i in range(1000)])
        assert len(said) == output_capture.MAX_LINES_PER_SECOND
        second[0] = 2.0
        ours.hand_on("stdout", "later")
    assert said[-2:] == [f"... {1000 - output_capture.MAX_LINES_PER_SECOND} more lines in that second", "later"]


def test_a_sink_that_fails_does_not_stop_the_training() -> None:
    def sink(stream: str, text: str) -> None:
        raise OSError("disk full")

    done = []
    with OutputCapture("rank ", sink):
        run_as("rank 0 training", lambda: (print("x"), done.append(1)))
    assert done == [1]


def test_text_without_a_newline_is_handed_on_when_its_thread_has_ended() -> None:
    said: list[str] = []
    with OutputCapture("rank ", lambda stream, text: said.append(text)) as ours:
        for number in range(3):  # the system gives the id of an ended thread to the next one
            run_as("rank 0 worker", lambda number=number: print(f"begun {number}", end=""))  # type: ignore[misc]
        run_as("rank 0 worker", lambda: print("whole"))
        assert said == ["begun 0", "begun 1", "begun 2", "whole"]
        run_as("rank 0 training", lambda: (print("last words", end=""), ours.end_lines()))
        assert said[4:] == ["last words"]
        run_as("rank 0 training", lambda: print("left over", end=""))
    assert said[5:] == ["left over"]


def test_a_line_without_end_keeps_a_bounded_beginning() -> None:
    said: list[str] = []
    with OutputCapture("rank ", lambda stream, text: said.append(text)):
        run_as("rank 0 training", lambda: [print("x" * 1000, end="\r") for _ in range(100)])
        longest = max(len(text) for text in vars(sys.stdout)["_unfinished_lines"].values())
        assert longest <= output_capture.MAX_LINE_LENGTH
    assert [len(text) for text in said] == [output_capture.MAX_LINE_LENGTH]


def test_a_forked_child_neither_repeats_nor_loses_text(tmp_path: Path) -> None:
    """No thread of the child hands its lines on, so they go to the stream that it inherited."""
    said: list[tuple[str, str]] = []
    usual = open(tmp_path / "usual", "w")

    def say() -> None:
        print("child line")
        print("child tail", end="")

    def train() -> None:
        print("begun", end=" ")
        child = multiprocessing.get_context("fork").Process(target=say)
        child.start()
        child.join()
        print("and ended")

    with contextlib.redirect_stdout(usual), OutputCapture("rank ", lambda *row: said.append(row)):
        run_as("MainThread", lambda: print("parent", flush=True))
        run_as("rank 0 training", train)
    usual.close()
    assert said == [("stdout", "begun and ended")]
    assert (tmp_path / "usual").read_text() == "parent\nchild line\nchild tail"
