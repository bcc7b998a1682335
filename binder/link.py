"""Prints the address at which Binder opens the first lesson, from where this was cloned: `make binder`.

Binder is a service of others, mybinder.org, which reads repositories that anybody can read, over https.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

LESSON = "notebooks/01_first_run.ipynb"
NOWHERE = ("this repository was not cloned from an address that others can read over https: "
           "push it to one, or set it with `git remote set-url origin`")  # fmt: skip


def link(origin: str) -> str:
    """Binder's address for what was cloned from `origin`. Raises ValueError where others cannot read that."""
    found = re.fullmatch(r"(?:https://(?:[^/@]*@)?|ssh://git@|git@)([\w.-]+\.\w+)[:/](.+?)(?:\.git)?/?", origin.strip())
    if not found:
        raise ValueError(NOWHERE)
    host, path = found.groups()
    where = f"gh/{path}" if host == "github.com" else f"git/{quote(f'https://{host}/{path}', safe='')}"
    return f"https://mybinder.org/v2/{where}/HEAD?urlpath={quote(f'lab/tree/{LESSON}', safe='')}"


if __name__ == "__main__":
    command = ["git", "-C", str(Path(__file__).parent), "remote", "get-url", "origin"]
    try:
        print(link(subprocess.run(command, capture_output=True, text=True, check=False).stdout))
    except ValueError as reason:
        sys.exit(str(reason))
