"""TensorBoard and Weights & Biases as trackers. Their packages are extras, imported when a run starts.

Both start a resumed run's record anew from the rows that count, so the record has every round exactly once whatever was
lost or written twice when the run was interrupted, and also when tracking was turned on only now.
"""

from __future__ import annotations

import re
import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradalign.errors import GradalignError, need
from gradalign.runs import TENSORBOARD, WANDB, as_toml
from gradalign.tracking import Row, RunInfo, flat_settings, tagged


def _own(folder: Path) -> Path:
    """Return a folder inside the run folder; what a link leads to is not this run's to delete and write in."""
    if folder.is_symlink():
        raise GradalignError(f"{folder} is a symbolic link, which may lead anywhere; remove it")
    return folder


class TensorBoard:
    """Writes event files that ``tensorboard --logdir`` shows: all metrics, the settings, and the HPARAMS tab.

    Args:
        folder: Where to write; the folder ``tensorboard`` in the run folder when not given. A folder shows one run:
            the latest that was written to it.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        need("tensorboard", "tensorboard")
        self._folder = None if folder is None else Path(folder)
        self.subfolder = TENSORBOARD if folder is None else None
        self._writer: Any = None
        self._began = 0.0
        self._hparams: dict[str, Any] = {}

    def start(self, run: RunInfo) -> None:
        """Begin an event file with the settings and the earlier rows."""
        from torch.utils.tensorboard import SummaryWriter

        if self._folder is None and run.folder is None:
            raise GradalignError("TensorBoard has no folder to write to: give the run one, or TensorBoard(folder)")
        folder = self._folder or _own(Path(run.folder or "") / TENSORBOARD)
        before = list(folder.glob("events.out.tfevents.*"))
        if self._folder is None:  # in the run folder all of them are this run's
            for old in before:
                old.unlink()
        # What a TensorBoard has read of them so far is purged from the first step on.
        self._writer = SummaryWriter(str(folder), purge_step=0 if before else None)
        self._hparams = {
            key: value if isinstance(value, int | float | str) else str(value)
            for key, value in flat_settings(run.settings).items()
        }
        self._writer.add_text("settings", textwrap.indent(as_toml(run.settings), "    ", lambda line: True), 0)
        spent = run.earlier[-1].get("seconds") if run.earlier else None
        self._began = time.time() - (spent or 0.0)
        for row in run.earlier:
            self._add(row)
        self._writer.flush()

    def _add(self, row: Row) -> None:
        moment = self._began + (row.get("seconds") or 0.0)
        for tag, value in tagged(row).items():
            self._writer.add_scalar(tag, value, row["round"], walltime=moment)

    def log(self, row: Row) -> None:
        """Add a row; it is on disk when this returns."""
        self._add(row)
        self._writer.flush()

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Write the HPARAMS tab's entry and close the file."""
        from torch.utils.tensorboard.summary import hparams

        writer, self._writer = self._writer, None
        if summary is not None:
            # SummaryWriter.add_hparams would make a second run for this; its parts can go into the one there is.
            names = ("final_test_accuracy", "best_test_accuracy", "final_test_loss")
            metrics = {f"summary/{name}": summary[name] for name in names if summary.get(name) is not None}
            for part in hparams(self._hparams, metrics):
                writer.file_writer.add_summary(part)
            for tag, value in metrics.items():
                writer.add_scalar(tag, value, summary["rounds"])
        writer.close()


class WeightsAndBiases:
    """Sends a run to Weights & Biases, or keeps it in the run folder for ``wandb sync`` when offline.

    Args:
        project: The project's name there.
        mode: "online", "offline" or "disabled"; None leaves it to wandb's own settings, such as ``WANDB_MODE``.
        entity: The user or team that owns the project.
        group: What the runs are grouped under; the experiment's name when not given.
        tags: Tags of the run.
        folder: Where wandb keeps its files; the folder ``wandb`` in the run folder when not given.
    """

    def __init__(
        self,
        project: str = "gradalign",
        *,
        mode: Literal["online", "offline", "disabled"] | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        folder: str | Path | None = None,
    ) -> None:
        need("wandb", "wandb")
        self._given: dict[str, Any] = {"project": project, "mode": mode, "entity": entity, "tags": list(tags) or None}
        self._group = group
        self._folder = None if folder is None else Path(folder)
        self.subfolder = WANDB if folder is None else None
        self._run: Any = None
        self._first = 0

    def start(self, run: RunInfo) -> None:
        """Open the run there, or go on with it, and send the earlier rows that it does not have."""
        import wandb

        home = self._folder or run.folder
        # Only in the run folder it is certain that they are this run's.
        before = _former(_own(run.folder / WANDB)) if run.folder is not None and self._folder is None else []
        # wandb calls folders by the second they are made in: a new one must not get the last one's name.
        while before and before[-1].second == time.strftime("%Y%m%d_%H%M%S"):
            time.sleep(0.02)
        try:
            self._run = wandb.init(
                **self._given,
                id=before[-1].id if before else None,
                resume="allow",
                name=run.name,
                group=self._group or run.settings.get("name"),
                dir=None if home is None else str(home),
                config=dict(run.settings),
                # The terminal is the progress bar's, and what it prints is nobody's log.
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:
            raise GradalignError(
                f"Weights & Biases could not start: {' '.join(str(error).split())} "
                "(without an account or a network: wandb.mode=offline)"
            ) from None
        # A server that has some rounds already takes only later ones; an offline record begins at 0.
        self._first = self._run.step
        for row in run.earlier:
            self.log(row)
        if self._run.offline:
            for old in before:  # the new record has all of it: syncing both would send rounds twice
                shutil.rmtree(old.folder, ignore_errors=True)

    def log(self, row: Row) -> None:
        """Send a row as the step of its round."""
        if row["round"] >= self._first:
            self._run.log(tagged(row), step=row["round"], commit=True)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Add the summary and close the run there; wandb writes an offline record a moment after this, or at exit."""
        run, self._run = self._run, None
        if summary is not None:
            names = [name for name, value in summary.items() if value is None or isinstance(value, int | float | str)]
            run.summary.update({f"summary/{name}": summary[name] for name in names})
        run.finish(exit_code=0 if summary is not None else 1)


_NAMED = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(\w+)")


class _Former(NamedTuple):
    second: str
    id: str
    folder: Path


def _former(folder: Path) -> list[_Former]:
    """Return wandb's folders of the run so far, oldest first."""
    folders = [path for path in folder.glob("*run-*") if path.is_dir() and not path.is_symlink()]
    named = [(_NAMED.fullmatch(path.name), path) for path in folders]
    return sorted(_Former(match[1], match[2], path) for match, path in named if match)
