"""Beginning with a checkpoint: what a run takes back from it, and what it tells about that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from mimo.checkpoint import Manifest
from mimo.hooks import Generators, Stateful, StateTree
from mimo.optimizer.runtime import zeros_like
from mimo.topology.collectives import all_gather_json
from mimo.trainer.config.names import BUFFERS, IMPORTED, OPTIMIZER, PROGRESS, SETTINGS
from mimo.trainer.resume.chain import all_names, find_chain, links_of, load_links, mark_chain
from mimo.trainer.resume.compatibility import differences, refuse
from mimo.trainer.resume.data_order import order_changes, resumed_samples
from mimo.trainer.resume.match_keys import fit
from mimo.trainer.resume.renaming import Renaming
from mimo.trainer.resume.resume_point import Source
from mimo.trainer.resume.run_state import RunState, other_state
from mimo.trainer.step.trainer import Trainer

_FLOATING = {"F32": torch.float32, "BF16": torch.bfloat16}
"""Kinds of numbers that moments are saved in."""


@attrs.frozen(kw_only=True)
class Resumed:
    """What `resume` has loaded.

    Args:
        state: what the run's own checkpoints hold again.
        summary: which checkpoint was loaded, what of the run began new, what was left, and which settings differ.
    """

    state: RunState
    summary: str


def begin(trainer: Trainer) -> RunState:
    """Return the state of a run that begins with no checkpoint; collective over all ranks.

    Raises:
        ConfigError: its checkpoints are to leave out weights that are in no other one.
    """
    settings = trainer.job.settings
    return RunState(left_out=find_chain(trainer.parts.constants(), (), settings, group=trainer.objects))


def resume(trainer: Trainer, parts: Iterable[Stateful], source: Source) -> Resumed:
    """Load what `mimo.trainer.resume.save.save_step` saved, in this layout or another, this precision or another.

    Moments go on in the kind of numbers that settings name, whatever they were saved in.

    Collective over all ranks. What begins new has been made so: parameters by the seed, states by their optimizers,
    the rest by its plugins.

    Raises:
        ConfigError: an optimizer has no use for the states that the checkpoint has.
        CheckpointError: anything is missing, unexpected or misshapen, or damaged.
    """
    take, parts = source.take, list(parts)
    tree: dict[str, StateTree] = dict(trainer.model_state())
    taken: list[Stateful] = []
    if not source.finetunes:
        taken = [part for part in parts if take.rng or not isinstance(part, Generators)]
        others = other_state(trainer, RunState(), taken, 0)
        tree |= {name: others[name] for name in others.keys() - {BUFFERS, IMPORTED, PROGRESS, SETTINGS}}
        if take.optimizer:
            tree[OPTIMIZER] = trainer.optimizer.state()
    links = links_of(source.folder)
    names = all_gather_json(sorted(_names(tree)), trainer.objects)
    found = fit(
        {name for each in names for name in each},
        all_names(links),
        modules=[module.name for module in trainer.job.modules],
        saved=source.manifest.topology,
        take=take,
        finetunes=source.finetunes,
        untaken=[part.name for part in parts if part not in taken],
        trained=source.trained([module.spec for module in trainer.job.modules]),
        fresh=source.fresh,
        adapted=[module.name for module in trainer.job.modules if module.lora is not None],
    )
    refuse(list(found.problems), str(source.folder))
    if OPTIMIZER in tree:
        tree[OPTIMIZER] = _as_saved(tree[OPTIMIZER], source.manifest, Renaming(found.rename))
    loaded = load_links(
        links,
        tree,
        rename=found.rename,
        may_lack=found.may_lack,
        refuse_left=True,
        may_leave=found.may_leave,
        on_progress=trainer.heartbeat,
        group=trainer.objects,
    )
    if OPTIMIZER in loaded.tree:
        trainer.optimizer.load(loaded.tree[OPTIMIZER])
    for part in taken:
        if part.name in found.found:  # the same on every rank, as it may be collective
            part.load(loaded.tree[part.name])
    state = RunState(
        data_begun=source.data_begun,
        schedule_begun=source.schedule_begun,
        imported=dict(_imported(trainer, source)),
        left_out=find_chain(trainer.parts.constants(), links, trainer.job.settings, group=trainer.objects),
    )
    broken = source.broken if source.take.data and not source.finetunes else ()
    samples = resumed_samples(trainer.job, source)
    trainer.begin_at(samples, schedule_begun=state.schedule_begun, broken=broken)
    new = [*found.new, *_begun_anew(source, parts)]
    summary = "; ".join(
        [
            f"{'weights of ' if source.finetunes else ''}step {source.manifest.step} loaded from {source.folder}",
            *(f"{what}: {', '.join(items)}" for what, items in (("new", new), ("left", found.left)) if items),
            *map(str, differences(trainer.job, source)),
            *order_changes(trainer.job, source),
            *(mark_chain(state.left_out, links, trainer.job.directory) if trainer.rank == 0 else ()),
        ]
    )
    return Resumed(state=state, summary=summary)


def _as_saved(state: StateTree, saved: Manifest, renaming: Renaming) -> StateTree:
    """Return an optimizer's state with room for floating numbers of the kind that was saved, where it is of another."""

    def room(name: str, value: Any) -> Any:
        entry = saved.tensors.get(renaming.there(f"{OPTIMIZER}.{name}"))
        dtype = None if entry is None else _FLOATING.get(entry.dtype)
        is_other = isinstance(value, Tensor) and value.dtype in _FLOATING.values() and dtype not in (None, value.dtype)
        return zeros_like(value, dtype) if is_other else value

    return {
        module: {key: room(f"{module}.{key}", value) for key, value in values.items()}
        if isinstance(values, Mapping)
        else values
        for module, values in state.items()
    }


def _imported(trainer: Trainer, source: Source) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the modules that the checkpoint has from published folders; all of them is in what the run saves."""
    there = Renaming(source.take.rename).there
    for module in trainer.job.modules:
        if (about := source.imported.get(there(module.name))) is not None:
            yield module.name, {**about, "fresh": []}


def _begun_anew(source: Source, parts: Iterable[Stateful]) -> Iterator[str]:
    """Yield what settings say is not taken, in words."""
    take = source.take
    if source.finetunes:
        return
    if not take.optimizer and not source.has_optimizer:
        yield "optimizer states (moments, step counts, loss scale), as checkpoint.optimizer = false saved none"
    elif not take.optimizer:
        yield "optimizer states"
    if not take.schedule:
        yield "learning-rate schedules"
    if not take.data:
        yield "place in the data"
    if not take.rng:
        yield from ("order of samples", *(part.name for part in parts if isinstance(part, Generators)))


def _names(tree: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield the names of all leaves, keys joined with dots."""
    for key, branch in tree.items():
        if isinstance(branch, Mapping):
            yield from _names(branch, f"{before}{key}.")
        else:
            yield f"{before}{key}"
