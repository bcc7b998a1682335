"""Tests a live run's reports on its ranks: collectives, clocks, cost of recording, GPUs, profiles."""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from widgets.charts.feed import Feed
from widgets.views import all_views
from workbench.analysis import list_clocks, list_open, measure_gpus, recording_costs
from workbench.analysis.resources.upkeep import describe_upkeep
from workbench.engine.device import gpu_monitor as gauges
from workbench.engine.record.step_profiler import StepProfiler
from workbench.record.run import RunError, Standing
from workbench.record.timeline import Mark, Sample
from workbench.run import Run


def shown(name: str, run: Run) -> str:
    return next(kind() for kind in all_views().values() if kind.name == name).update(run).html or ""


def test_entered_lists_waiting_and_missing_ranks_of_a_collective() -> None:
    bucket, group = "all_reduce bucket 1", "all_gather params 3 in within [0, 1]"
    waits = [Standing(r, 7, bucket, True, 3.0 + r) for r in (0, 1, 3)]
    (found,) = list_open([*waits, Standing(2, 7, "backward", False, 5.0)])
    assert (found.step, found.collective, found.entered, found.seconds) == (7, bucket, (0, 1, 3), 3.0)
    assert found.missing == ((2, "backward of step 7, for 5 s"),)
    (found,) = list_open(
        [Standing(0, 7, group, True, 1.0), *(Standing(r, 7, "backward", False, 1.0) for r in (1, 2, 3))]
    )
    assert [r for r, _ in found.missing] == [1], "who is not of the group is not missing in it"
    (found,) = list_open([Standing(2, 7, "recv forward 0 from 1", True, 4.0), Standing(0, 7, "backward", False, 4.0),
                        Standing(1, 7, "forward", False, 4.0)])  # fmt: skip
    assert [r for r, _ in found.missing] == [1], "of a message only the sender is missing"
    assert list_open([Standing(0, 7, "backward", False, 9.0)]) == []


def test_the_table_of_waiting_ranks_updates_without_new_rows() -> None:
    table = [Standing(0, 7, "all_reduce bucket 1", True, 0.4), Standing(1, 7, "backward", False, 0.5)]
    run = Run({"ranks": 2}, live=True)
    run._control = SimpleNamespace(standing=table, holdup="", profile=lambda rank, steps: Path("trace"))  # type: ignore
    assert shown("entered", run) == "", "a short wait is no wait to speak of"
    table[:] = [t._replace(seconds=t.seconds + 3) for t in table]
    feed = Feed(run)
    first = feed.make_opening()[0]["views"]["entered"]["html"]
    assert "all_reduce bucket 1 of step 7" in first and "rank 1: backward of step 7, for 4 s" in first
    assert len(run.entered()) == 1 and run.profile(1) == Path("trace")
    table[:] = [t._replace(seconds=0.1) for t in table]
    assert feed.make_news()[0]["views"]["entered"]["html"] == ""  # type: ignore[index]
    run.live = False
    assert run.standing == [] and run.entered().empty
    with pytest.raises(RunError, match="not live"):
        run.profile()


def test_clocks_and_recording_in_words() -> None:
    run = Run({"ranks": 3})
    for rank, (host, offset, error) in enumerate((("a", 0.0, 0.0), ("b", -0.02, 5e-5), ("c", 0.003, 2e-5))):
        detail = {"host": host, "clock_offset": offset, "clock_error": error}
        run.timeline.marks.add([Mark(rank, 0, "start", 0.0, json.dumps(detail))])
        told = [Sample(rank, s, name, float(s), v) for s in (5, 9) for name, v in (("cpu_process", 10.0),
                                                                                  ("cpu_recording", 0.04))]  # fmt: skip
        run.timeline.samples.add(told)
    assert list_clocks(run)[1] == (1, "b", -0.02, 5e-5) and recording_costs(run.timeline)[2] == (2, 20.0, 0.08)
    text = describe_upkeep(list_clocks(run), recording_costs(run.timeline))
    assert text == ("Clock errors are at most 0.05 ms; rank 1's clock was 20 ms behind rank 0's. Recording took 0.4 % "
                    "of the ranks' CPU time.")  # fmt: skip
    assert "20 ms behind" in shown("upkeep", run) and shown("upkeep", Run({"ranks": 2})) == ""
    assert run.clocks().error.tolist() == [0.0, 5e-5, 2e-5] and run.recording().recording.tolist() == [0.08] * 3


class Nvml:
    """A stand-in for nvidia-ml-py: one GPU with or without NVLink, without a power meter."""

    class NVMLError(Exception):
        pass

    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    def __init__(self, links: bool) -> None:
        self.links, self.kib = links, 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1"
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetPcieThroughput(self, gpu: str, way: int) -> int:
        return (10, 20)[way]

    def nvmlDeviceGetFieldValues(self, gpu: str, fields: list[int]) -> list[Any]:
        self.kib += 500
        return [SimpleNamespace(nvmlReturn=0 if self.links else 3, value=SimpleNamespace(ullVal=self.kib * times))
                for times in (1, 2)]  # fmt: skip


@pytest.mark.parametrize("links", [True, False])
def test_a_gpus_gauge_reads_available_values_and_omits_the_rest(links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a stand-in, not a GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(links))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    got: list[tuple[str, float]] = []
    read = gauges.start_gpu_monitor("cuda:0", lambda name, value: got.append((name, value)))
    assert read is not None
    read.close()
    first, then = read.read_values(100.0), read.read_values(102.0)
    assert "gpu power" not in then and then["gpu use"] == 0.75
    assert (then["gpu link sent"], then["gpu link received"]) == ((256_000, 512_000) if links else (10_240, 20_480))
    assert ("gpu link sent" in first) is not links, "a rate of a counter needs two readings"
    assert gauges.start_gpu_monitor("cpu", print) is None  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gauges.start_gpu_monitor("cuda:0", print) is None, "without the library nothing is read"  # type: ignore[arg-type]


def test_gpus_are_on_the_page_where_they_are_read_and_nowhere_else() -> None:
    run = Run({"ranks": 2})
    assert shown("gpu", run) == "" and run.gpus().empty
    run.timeline.samples.add([Sample(1, s, "gpu use", float(s), v) for s, v in ((1, 1.0), (20, 0.5), (21, 0.7))])
    run.timeline.samples.add([Sample(1, 21, "gpu link sent", 21.0, 2e9)])
    (found,) = measure_gpus(run.timeline)
    assert found[:2] == (1, pytest.approx(0.6)) and np.isnan(found.power), "the newest ten seconds alone"
    assert "60 % of the time" in shown("gpu", run) and "GB/s" in shown("gpu", run)


def until(so: Any, patience: float = 60.0) -> None:
    end = time.monotonic() + patience
    while not so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_profile_covers_all_threads_and_never_ends_the_run(tmp_path: Path) -> None:
    marks: list[dict[str, Any]] = []
    profiler = StepProfiler(1, tmp_path, "cpu", lambda name, detail: marks.append(detail))
    path = Path(profiler.request_profile(2))
    with pytest.raises(RuntimeError, match="being profiled already"):
        profiler.request_profile(2)
    until(lambda: profiler._steps_due)
    for step in (40, 41, 42):
        profiler.begin_step(step)
        beside = threading.Thread(target=torch.ones(8).sort if step < 42 else partial(torch.ones(8).cumsum, 0))
        beside.start()
        beside.join()
        _ = torch.ones(4, 4) @ torch.ones(4, 4)
        profiler.end()
    until(lambda: marks)
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"aten::mm", "aten::sort"} <= names and "aten::cumsum" not in names, "of another thread, and of two steps"
    assert marks[0]["path"] == str(path) and (marks[0]["steps"], marks[0]["first"]) == (2, 40)
    (tmp_path / "file").write_text("")
    other, said = StepProfiler(0, tmp_path / "file", "cpu", lambda name, detail: marks.append(detail)), len(marks)
    other.request_profile(3)
    until(lambda: other._steps_due)
    other.begin_step(50)
    other.stop_profile()
    other.close()
    assert len(marks) == said + 1
    assert marks[-1]["text"].startswith("rank 0 could not be profiled: ")
    with pytest.raises(RuntimeError, match="no directory"):
        StepProfiler(0, None, "cpu", lambda name, detail: None).request_profile(1)


def test_a_profile_that_no_step_began_is_reported_at_the_end(tmp_path: Path) -> None:
    marks: list[dict[str, Any]] = []
    profiler = StepProfiler(0, tmp_path, "cpu", lambda name, detail: marks.append(detail))
    profiler.request_profile(2)
    until(lambda: profiler._steps_due)
    profiler.stop_profile()
    profiler.close()
    assert [mark["text"] for mark in marks] == ["rank 0 could not be profiled: the run ended before the next step"]
