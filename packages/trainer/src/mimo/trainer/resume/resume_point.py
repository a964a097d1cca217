"""The checkpoint that a run begins with: which one is meant, and what of it is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from mimo.checkpoint import Manifest, latest, read_manifest
from mimo.hooks import CheckpointError, JsonNode, JsonSource
from mimo.model import ModuleSpec, is_frozen
from mimo.topology.collectives import broadcast_json
from mimo.trainer.config.names import CHECKPOINTS, IMPORTED
from mimo.trainer.config.settings import LoadSettings, Settings
from mimo.trainer.config.structure import structure, unstructure
from mimo.trainer.resume.attempt import Attempt
from mimo.trainer.resume.directory import has_steps

_STATES = "optimizer."


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
        """Return a step folder as a source; of one that was saved without optimizer states none are taken.

        Raises:
            CheckpointError: its manifest is damaged.
        """
        source = cls(folder=folder, manifest=read_manifest(folder), take=take, finetunes=finetunes)
        return source if source.has_optimizer else attrs.evolve(source, take=attrs.evolve(take, optimizer=False))

    @property
    def has_optimizer(self) -> bool:
        """Whether it was saved with optimizer states: not if its own settings leave them out; tools may have since."""
        settings = self.manifest.config.get("checkpoint")
        left_out = isinstance(settings, Mapping) and settings.get("optimizer") is False
        return not left_out or any(name.startswith(_STATES) for name in self.manifest.names)

    @property
    def first_step(self) -> int:
        """The step with which the run begins."""
        return 1 if self.finetunes else self.manifest.step + 1

    @property
    def schedule_begun(self) -> int:
        """Steps of the run before the learning rates' schedules began."""
        return self._begun("schedule_begun", resumes=self.take.schedule)

    @property
    def data_begun(self) -> int:
        """Steps of the run before its data began."""
        return self._begun("data_begun", resumes=self.take.data)

    def trained(self, specs: Iterable[ModuleSpec]) -> frozenset[str]:
        """Return the names of the modules of which the checkpoint's own settings say that they were trained.

        One all of whose tensors they freeze by parts or patterns was not, if its plugin is among ``specs``.
        """
        found = {spec.name: spec for spec in specs}
        modules = self.manifest.config.get("modules", {})
        return frozenset(
            name for name, table in modules.items() if not self._is_frozen(name, table, found.get(table.get("plugin")))
        )

    @property
    def broken(self) -> tuple[int, ...]:
        """Numbers of the samples that the run has left out, as their items can't be decoded.

        Raises:
            CheckpointError: the checkpoint holds something else there.
        """
        key = "progress.broken"
        where = JsonSource(where=f"{self.folder}: {key}", error=CheckpointError, fix="Load another checkpoint.")
        return JsonNode(self.manifest.common.get(key, []), where).sizes()

    @property
    def imported(self) -> Mapping[str, Any]:
        """Of the modules that were read from published folders, by name, what is known of that."""
        beginning = f"{IMPORTED}."
        values = self.manifest.common.items()
        return {name.removeprefix(beginning): value for name, value in values if name.startswith(beginning)}

    @property
    def fresh(self) -> tuple[str, ...]:
        """Prefixes of names of which the checkpoint has nothing, as what its modules were read from has not."""
        return tuple(f"{module}.{part}" for module, about in self.imported.items() for part in about["fresh"])

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

    def _is_frozen(self, module: str, table: Mapping[str, Any], spec: ModuleSpec | None) -> bool:
        frozen = table.get("frozen", ())
        if table.get("lora") is not None:
            return False
        if isinstance(frozen, bool) or spec is None:
            return frozen is True
        paths = (name.removeprefix(f"{module}.") for name in self.manifest.tensors if name.startswith(f"{module}."))
        return bool(frozen) and all(is_frozen(spec, path, frozenset(frozen)) for path in paths)

    def _begun(self, name: str, *, resumes: bool) -> int:
        if self.finetunes:
            return 0
        return int(self.progress(name)) if resumes else self.manifest.step


def find_source(settings: Settings, *, last: Attempt | None = None) -> Source | None:
    """Return what a run begins with; None where that is nothing.

    A run that has saved a checkpoint goes on with that, if ``checkpoint.load`` is ``latest``. A job that torchrun or
    Slurm has restarted goes on with all of what it has saved itself, as what ``[load]`` says is done by then; before
    its first checkpoint it begins as it did, whatever others have left in its directory.

    Args:
        settings: the whole file.
        last: the attempt of the same job that this one follows.

    Raises:
        CheckpointError: there is no complete checkpoint where one is named, or where steps are.
    """
    where, load = settings.checkpoint.load, settings.load
    directory = Path(settings.directory)
    has_saved = last is not None and last.has_saved(directory)
    if has_saved or (where == "latest" and has_steps(directory)):
        own = step_folder(directory / CHECKPOINTS)
        return Source.of(own, LoadSettings() if has_saved or load.finetune else load)
    if load.finetune:
        return Source.of(step_folder(Path(load.finetune)), load, finetunes=True)
    return None if where in {"none", "latest"} else Source.of(step_folder(Path(where)), load)


def share_source(source: Source | None, group: dist.ProcessGroup | None = None) -> Source | None:
    """Return rank 0's source on every rank: others may see an older ``latest`` for a while.

    Args:
        source: of rank 0.
        group: over which it is sent; None for the default group.
    """
    own = None if source is None else [str(source.folder), unstructure(source.take), source.finetunes]
    shared = broadcast_json(own, group)
    if dist.get_rank() == 0 or shared is None:
        return source if dist.get_rank() == 0 else None
    folder, take, finetunes = shared
    return Source.of(Path(folder), structure(take, LoadSettings, "load"), finetunes=finetunes)


class NoCheckpointError(CheckpointError):
    """A path that somebody gave, at which there is no checkpoint: refused like a wrong setting."""

    exit_code = 2


def step_folder(path: Path) -> Path:
    """Return the newest step folder of a run directory or of its ``checkpoints``, or ``path`` if it is one itself.

    Raises:
        NoCheckpointError: there is no complete checkpoint there.
    """
    if (path / "manifest.json").is_file():
        return path
    found = latest(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)
    if found is None:
        raise NoCheckpointError(
            str(path),
            expected="a run directory, its checkpoints folder, or one step's folder",
            got="no complete checkpoint there",
            fix=_fix(path),
        )
    return found


def _fix(path: Path) -> str:
    """Return what to do about a folder without a checkpoint, such as a published one."""
    if not path.exists():
        return "Check the path: nothing is there."
    if (path / "config.json").is_file():
        return f"`mimo checkpoint import-hf {path} --out DIR` makes one of a published folder."
    return ""
