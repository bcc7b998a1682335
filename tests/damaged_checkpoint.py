"""A damaged checkpoint: the values that a reader gets, or its error."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.ranks import experiment, toy
from workbench import Checkpoint, simulate
from workbench.compressors import TopK
from workbench.host.checkpoint.restore import open_image
from workbench.optimizers import AdamW
from workbench.record.checkpoints import MANIFEST, CheckpointFiles, name
from workbench.record.store import RunError
from workbench.strategies import ZeRO3

AT = 4  # the step of the damaged checkpoint; another one, before step 2, stays intact
RESUMED = 40  # one seed in so many is also resumed


class DamagedCheckpoint:
    """Two ranks' shards, AdamW's state and TopK's residual."""

    manifest = f"{name(AT)}/{MANIFEST}"

    def make(self, folder: Path) -> None:
        self.experiment = experiment(2, AT, strategy=ZeRO3(), optimizer=AdamW(), compressor=TopK.usual(), pace=5.0,
                                     save_every=2)  # fmt: skip
        simulate(self.experiment, real=True, checkpoints=folder)
        self.good = self._values(folder / name(AT))
        self.resumed = self._go_on(folder / name(AT))

    def files(self, folder: Path) -> list[Path]:
        return sorted((folder / name(AT)).iterdir())

    def read(self, folder: Path, file: Path, way: str, seed: int) -> tuple[str, str]:
        """refused: by RunError, which names the checkpoint, the file and the older checkpoint; same; other; unclear"""
        path = folder / name(AT)
        try:
            same = self._values(path) == self.good
            if same and seed % RESUMED == 0:
                same = self._go_on(path) == self.resumed
        except RunError as error:
            text, gone = str(error), file.name == MANIFEST and not file.exists()
            swapped = way == "swap" and any(each.name in text for each in self.files(folder))
            clear = str(path) in text and (file.name in text or swapped)
            if gone or (clear and str(folder / name(2)) in text and "\n" not in text):
                return "refused", text
            return "unclear", text
        return ("same" if same else "other"), f"{file.name} was changed by {way}"

    def _values(self, path: Path) -> str:
        """Returns a digest of all values that ranks, or readers of the model, read from a checkpoint."""
        digest, checkpoint = hashlib.sha256(), Checkpoint.open(path)
        files = CheckpointFiles(checkpoint)
        try:
            c = checkpoint
            whole: list[Any] = [c.step, c.ranks, c.kind, c.settings, c.held_out, c.asked, c.planned, c.made]
            digest.update(json.dumps([*whole, c.said.get("reads")]).encode())
            for rank in range(c.ranks):
                image = open_image(c, files, rank)
                digest.update(json.dumps(image.entries).encode())
                for number in range(len(c.each[rank]["items"])):
                    digest.update(image.read_tensor(number).reshape(-1).numpy().tobytes())
        finally:
            files.close()
        for _, x in sorted(checkpoint.model(toy()).state_dict().items()):
            digest.update(x.numpy().tobytes())
        return digest.hexdigest()

    def _go_on(self, path: Path) -> list[float]:
        """Returns the losses of two more steps."""
        e = replace(self.experiment, steps=AT + 2, save_every=0)
        run = simulate(e, real=True, resume=Checkpoint.open(path))
        rows = run.timeline.samples.rows()
        return list(rows[rows.equal("name", "loss") & (rows.step >= AT)].value.tolist())
