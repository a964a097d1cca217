"""The checkpoint that a run begins with: which one is meant, and what of it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from mimo.checkpoint import Manifest, latest, read_manifest
from mimo.hooks import CheckpointError
from mimo.trainer._preflight import CHECKPOINTS
from mimo.trainer._settings import LoadSettings, Settings
from mimo.trainer._structure import structure, unstructure


@attrs.frozen(kw_only=True)
class Source:
    """A checkpoint that a run begins with.

    Args:
        folder: of the step.
        manifest: what it holds.
        take: what of it is taken.
        finetunes: whether weights alone are, into a run that begins with its first step.
    """

    folder: Path
    manifest: Manifest
    take: LoadSettings
    finetunes: bool = False

    @classmethod
    def of(cls, folder: Path, take: LoadSettings, *, finetunes: bool = False) -> Source:
        """Return a step folder as a source.

        Raises:
            CheckpointError: its manifest is damaged.
        """
        return cls(folder=folder, manifest=read_manifest(folder), take=take, finetunes=finetunes)

    @property
    def first_step(self) -> int:
        """The step with which the run begins."""
        return 1 if self.finetunes else self.manifest.step + 1

    @property
    def schedule_begun(self) -> int:
        """Steps of the run before the learning rates' schedules began."""
        return self._begun("schedule_begun", goes_on=self.take.schedule)

    @property
    def data_begun(self) -> int:
        """Steps of the run before its data began."""
        return self._begun("data_begun", goes_on=self.take.data)

    def progress(self, name: str) -> Any:
        """Return what the checkpoint says of the run's progress.

        Raises:
            CheckpointError: it says nothing, as none that a run has saved.
        """
        key = f"progress.{name}"
        if key not in self.manifest.common:
            raise CheckpointError(
                str(self.folder),
                expected="a checkpoint that a run has saved, to go on with",
                got=f"one without {key}",
                fix="Its weights can begin a new run: load.finetune.",
            )
        return self.manifest.common[key]

    def _begun(self, name: str, *, goes_on: bool) -> int:
        if self.finetunes:
            return 0
        return int(self.progress(name)) if goes_on else self.manifest.step


def find_source(settings: Settings, *, restarted: bool = False) -> Source | None:
    """Return what a run begins with; None where that is nothing.

    A run that has saved a checkpoint goes on with that, if ``checkpoint.load`` is ``latest`` or torchrun or Slurm has
    restarted it; before its first one it begins as it did. What ``[load]`` says is done once: a restart goes on with
    all of a checkpoint that was saved after that.

    Args:
        settings: the whole file.
        restarted: whether an attempt of this run was made before.

    Raises:
        CheckpointError: there is no complete checkpoint where one is named.
    """
    where, load = settings.checkpoint.load, settings.load
    own = _own(Path(settings.directory) / CHECKPOINTS) if where == "latest" or restarted else None
    if own is not None:
        found = Source.of(own, load)
        done = restarted and found.manifest.config.get("load") == unstructure(load)
        return attrs.evolve(found, take=LoadSettings()) if done or load.finetune or where != "latest" else found
    if load.finetune:
        return Source.of(step_folder(Path(load.finetune)), load, finetunes=True)
    return None if where in {"none", "latest"} else Source.of(step_folder(Path(where)), load)


def share_source(source: Source | None) -> Source | None:
    """Return rank 0's source on every rank of the default group: others may see an older ``latest`` for a while."""
    told: list[Any] = [None if source is None else (str(source.folder), unstructure(source.take), source.finetunes)]
    dist.broadcast_object_list(told)
    if dist.get_rank() == 0 or told[0] is None:
        return source if dist.get_rank() == 0 else None
    folder, take, finetunes = told[0]
    return Source.of(Path(folder), structure(take, LoadSettings, "load"), finetunes=finetunes)


def step_folder(path: Path) -> Path:
    """Return the newest step folder of a run directory or of its ``checkpoints``, or ``path`` if it is one itself.

    Raises:
        CheckpointError: there is no complete checkpoint there.
    """
    if (path / "manifest.json").is_file():
        return path
    found = latest(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)
    if found is None:
        raise CheckpointError(
            str(path),
            expected="a run directory, its checkpoints folder, or one step's folder",
            got="no complete checkpoint there",
        )
    return found


def _own(folder: Path) -> Path | None:
    """Return the newest step folder of a run's checkpoints; None where it has saved none.

    Raises:
        CheckpointError: there are steps and none is complete: one that lacks its manifest is no beginning.
    """
    return step_folder(folder) if latest(folder) is not None or list(folder.glob("step_*")) else None
