"""Checks that voila shows the dashboard without any network beyond this machine."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser.conftest import private
from tests.browser.test_front_ends import SHOWN, kept, notebook, paged, used

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(600)]
RUNNING = re.compile(r"running at:\s+(http://127\.0\.0\.1:\d+/)")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Runs voila on look.ipynb of this folder; yields the address that voila prints."""
    log = folder / "voila.log"
    command = [sys.executable, "-m", "voila", "look.ipynb", "--no-browser", "--Voila.ip=127.0.0.1"]
    with log.open("w") as said:
        server = subprocess.Popen(command, cwd=folder, env=private(folder), stdout=said, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        while not (found := RUNNING.search(log.read_text())):
            assert server.poll() is None and time.monotonic() < end, f"voila does not run: {log.read_text()[-2000:]}"
            time.sleep(0.2)
        yield found[1]
    finally:
        server.terminate()
        server.wait(60)


def test_voila_shows_the_dashboard_and_its_controls_work_without_a_network(tmp_path: Path) -> None:
    notebook(tmp_path, f"{SHOWN}\ndashboard")
    with served(tmp_path) as address, paged() as page:
        cut = []

        def answer(route: Any) -> None:
            if urlsplit(route.request.url).hostname in (None, "127.0.0.1"):
                return route.continue_()
            cut.append(route.request.resource_type)
            return route.abort()

        page.route("**/*", answer)
        page.goto(address, wait_until="commit")  # the page arrives in parts, as cells run
        used(page)
        kept(page, "voila")
        assert set(cut) <= {"stylesheet"}, "nothing that it needs comes from elsewhere"
