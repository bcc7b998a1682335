"""Puts the lessons into the wheel without their stored outputs, which only GitHub and the site show."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LessonsWithoutOutputs(BuildHookInterface):  # type: ignore[type-arg]
    """Copies each notebook without outputs to a temporary folder that the wheel takes as shared data."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        for path in sorted(Path(self.root, "notebooks").glob("*.ipynb")):
            raw = json.loads(path.read_text("utf8"))
            raw["metadata"].pop("training-workbench", None)
            for cell in raw["cells"]:
                if cell["cell_type"] == "code":
                    cell["outputs"] = []
                    cell["metadata"].pop("jupyter", None)
            Path(self.folder.name, path.name).write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", "utf8")
        build_data["shared_data"][self.folder.name] = "share/training-workbench/notebooks"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()
