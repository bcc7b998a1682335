"""Finds a Chromium for Playwright; run as a program, installs one without root's rights.

Knows no test. Browser tests call `find_place()`, and skip with a reason if it returns None.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The path of a Chromium: the system's, or the one that Playwright installed for itself."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    return _own()


def _own() -> str | None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        path = p.chromium.executable_path
    return path if Path(path).exists() else None


def main() -> None:
    """Prints the Chromium that browser tests will use. Without one, installs Playwright's own."""
    if found := find():
        print(f"browser tests: {found}")
        return
    print("browser tests: no Chromium on this machine; asking Playwright for its own")
    command = [sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"]
    try:
        subprocess.run(command, timeout=180, check=True, capture_output=True)
    except (subprocess.SubprocessError, OSError):
        print("browser tests: none could be had; they will be skipped (on Debian: apt-get install chromium)")


if __name__ == "__main__":
    main()
