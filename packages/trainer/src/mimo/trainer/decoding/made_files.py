"""Files of what a model makes beside text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from mimo.hooks import ConfigError, RunError
from mimo.model import GeneratorSpec
from mimo.trainer.config.names import CHECKPOINTS
from mimo.trainer.decoding.running import Answer
from mimo.trainer.job.job import Job

MADE = "made"
"""Folder inside of a run's directory, with a folder for each time that something was made."""


@attrs.define
class MadeFiles:
    """Writes the items of answers into files of a new folder, which is there as soon as the first item is.

    Args:
        folder: that is not there yet.
        specs: by modality, the plugin that makes it.
    """

    folder: Path
    specs: Mapping[str, GeneratorSpec]

    @classmethod
    def of(cls, job: Job, checkpoint: Path, folder: Path | None) -> MadeFiles:
        """Return what writes the items of a job's model.

        Args:
            job: of the model.
            checkpoint: its step folder.
            folder: that is asked for; None: the next one in that of its run.
        """
        specs = {one.modality: one.spec for one in job.generators if isinstance(one.spec, GeneratorSpec)}
        return cls(folder or _next(checkpoint), specs)

    def add(self, answer: Answer) -> list[Path]:
        """Write the items of an answer, ``<number of the prompt>-<number of the item>-<modality>``, and return where.

        Raises:
            RunError: they can't be written.
        """
        found = []
        try:
            for number, (modality, raw) in enumerate(answer.items):
                self.folder.mkdir(parents=True, exist_ok=True)
                save = self.specs[modality].save
                assert save is not None
                found.append(save(raw, self.folder / f"{answer.number}-{number}-{modality}"))
        except OSError as error:
            raise RunError(
                "--made", expected="a folder that can be written to", got=f"{str(self.folder)!r} ({error})"
            ) from error
        return found


def check_folder(folder: Path, *, makes: Sequence[str]) -> None:
    """Refuse a folder for items that is there already, or for which there is nothing.

    Raises:
        ConfigError: see above.
    """
    if not makes:
        raise ConfigError(
            "--made", expected="a model that makes items", got="one that writes text alone", fix="Leave it out."
        )
    if folder.exists() or folder.is_symlink():
        raise ConfigError(
            "--made", expected="a folder that is not there yet", got=repr(str(folder)), fix="Name another, or move it."
        )


def _next(checkpoint: Path) -> Path:
    """Return the next folder for items in the directory of a checkpoint's run."""
    parent = checkpoint.parent
    run = parent.parent if parent.name == CHECKPOINTS else parent
    number = 1
    while (run / MADE / str(number)).exists():
        number += 1
    return run / MADE / str(number)
