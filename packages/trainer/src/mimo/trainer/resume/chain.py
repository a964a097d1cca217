"""Checkpoints that leave out what is not trained: where those weights lie instead, and reading both as one.

A checkpoint names the folder that its other weights came from, with a digest of that one's manifest. That one may name
a further one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from mimo.checkpoint import Loaded, Manifest, load, mark_needed, read_manifest
from mimo.hooks import CheckpointError, Common, ConfigError, StateTree
from mimo.model import lora_linear
from mimo.topology.collectives import all_gather_json
from mimo.trainer.config.names import BASE, CHECKPOINTS
from mimo.trainer.config.settings import Settings
from mimo.trainer.resume.renaming import Renaming


@attrs.frozen(kw_only=True)
class ChainLink:
    """A checkpoint of those that hold the weights of a model together.

    Args:
        folder: of the step.
        manifest: what it holds.
        tensors: names of those that are read from it, unless one before it has them.
    """

    folder: Path
    manifest: Manifest
    tensors: frozenset[str]

    def state(self, beside: Path) -> StateTree:
        """Return what another checkpoint says of it, whose folder lies in ``beside``."""
        folder = self.folder.absolute()
        return {
            "folder": Common(str(folder)),
            "relative": Common(os.path.relpath(folder, beside.absolute())),
            "identity": Common(self.manifest.identity),
        }


def links_of(folder: Path) -> tuple[ChainLink, ...]:
    """Return a checkpoint, and those that hold what it leaves out.

    Raises:
        CheckpointError: one of them is gone, damaged, or not the one that is meant.
    """
    manifest = read_manifest(folder)
    found = [ChainLink(folder=folder, manifest=manifest, tensors=frozenset(manifest.tensors))]
    while f"{BASE}.folder" in manifest.common:
        where, manifest = _base_of(found[-1])
        if any(link.manifest.identity == manifest.identity for link in found):
            raise CheckpointError(
                str(where), expected=f"weights that {found[-1].folder} leaves out", got="a checkpoint that leads there"
            )
        found.append(ChainLink(folder=where, manifest=manifest, tensors=_weights(manifest)))
    return tuple(found)


def _base_of(link: ChainLink) -> tuple[Path, Manifest]:
    """Return where the checkpoint lies that holds what another leaves out: where it was, or moved along with that."""
    common = link.manifest.common
    there, said = str(common[f"{BASE}.folder"]), common.get(f"{BASE}.identity")
    relative = common.get(f"{BASE}.relative")
    places = [Path(there), *([] if relative is None else [Path(os.path.normpath(link.folder.parent / str(relative)))])]
    held = [(place, read_manifest(place)) for place in places if (place / "manifest.json").is_file()]
    expected = f"the checkpoint with the weights that {link.folder} leaves out"
    if not held:
        fix = "Put it back there. Checkpoints hold all weights where checkpoint.frozen is true."
        raise CheckpointError(there, expected=expected, got="none", fix=fix)
    for place, manifest in held:
        if manifest.identity == said:
            return place, manifest
    raise CheckpointError(
        str(held[0][0]),
        expected=f"{expected}, of the digest {said}",
        got=f"another one, of the digest {held[0][1].identity}",
        fix="Put the right one back there.",
    )


def _weights(manifest: Manifest) -> frozenset[str]:
    """Return the names of what another checkpoint may leave out: weights, which what LoRA has learned never are."""
    tables = manifest.config.get("modules", {})
    adapted = {name for name, table in tables.items() if table.get("lora") is not None}
    return frozenset(
        name
        for name in manifest.tensors
        if (module := name.partition(".")[0]) in manifest.topology
        and (module not in adapted or lora_linear(name) is None)
    )


def all_names(links: Sequence[ChainLink]) -> frozenset[str]:
    """Return the names of all that the first of some checkpoints holds, and of the weights that it leaves out."""
    return links[0].manifest.names.union(*(link.tensors for link in links[1:]))


def load_links(
    links: Sequence[ChainLink],
    tree: Mapping[str, Any],
    *,
    rename: Mapping[str, str],
    group: dist.ProcessGroup | None = None,
    **how: Any,
) -> Loaded:
    """Do as `mimo.checkpoint.load` with the first checkpoint, and read what it leaves out from the others; collective.

    Args:
        links: of `links_of`, the same on every rank.
        tree: modules, and whatever else is asked of the first.
        rename: prefixes of names here, and what the checkpoints have instead.
        group: over which ranks talk; None for the default group.
        how: see `mimo.checkpoint.load`.
    """
    if len(links) == 1:
        return load(links[0].folder, tree, rename=rename, group=group, **how)
    there = Renaming(rename).there
    parts: list[dict[str, Any]] = [{} for _ in links]
    for module, leaves in tree.items():
        for path, leaf in leaves.items() if isinstance(leaves, Mapping) else ():
            at = max(_holder(links, there(f"{module}.{path}")), 0)
            parts[at].setdefault(module, {})[path] = leaf
        if not isinstance(leaves, Mapping) or not leaves:
            parts[0][module] = leaves
    loaded = None
    for link, part in zip(links, parts, strict=True):
        names = all_gather_json([*_paths(part)], group)
        fitting = _fitting(rename, [name for each in names for name in each])
        if loaded is None:
            loaded = load(link.folder, part, rename=fitting, group=group, **how)
        else:
            load(link.folder, part, rename=fitting, on_progress=how.get("on_progress"), group=group)
    assert loaded is not None
    return loaded


def find_chain(
    left_out: Iterable[str],
    links: Sequence[ChainLink],
    settings: Settings,
    *,
    group: dist.ProcessGroup | None = None,
) -> ChainLink | None:
    """Return the checkpoint that a run's own ones name for what they leave out; None where that is nothing. Collective.

    Args:
        left_out: names of this rank's weights that are not trained, nor changed otherwise.
        links: that the run began with, none for no checkpoint.
        settings: the whole file.
        group: over which ranks talk; None for the default group.

    Raises:
        ConfigError: they would have to be saved, for they are in none.
    """
    if settings.checkpoint.frozen:
        return None
    names = {name for each in all_gather_json(sorted(left_out), group) for name in each}
    if not names:
        return None
    if settings.load.rename:
        raise ConfigError(
            "checkpoint.frozen",
            expected="true, since what is not trained is called otherwise in the checkpoint that it came from",
            got="false, and load.rename",
            fix="Leave it out, or rename first: save once with all weights, and begin with that.",
        )
    holders = {name: _holder(links, name) for name in names}
    without = sorted(name for name, at in holders.items() if at < 0)
    if without:
        raise ConfigError(
            "checkpoint.frozen",
            expected=f"true, since no checkpoint has {without[0]}"
            + (f" and {len(without) - 1} more" if len(without) > 1 else "")
            + ", which is not trained",
            got="false",
            fix="Leave it out, or begin with a checkpoint that has all of it: load.finetune.",
        )
    return links[min(holders.values())]


def mark_chain(base: ChainLink | None, links: Sequence[ChainLink], directory: Path) -> list[str]:
    """Have no run's ``keep`` remove what a run's checkpoints leave out; return a message for each that can't be marked.

    Args:
        base: as `find_chain` has found it.
        links: that the run began with.
        directory: the run's.
    """
    unmarked = []
    for link in links[links.index(base) :] if base is not None else ():
        if CHECKPOINTS not in {link.folder.absolute().parent.name, link.folder.resolve().parent.name}:
            continue  # where none is removed
        try:
            mark_needed(link.folder, str(directory.absolute()))
        except OSError as error:
            unmarked.append(f"{link.folder} is needed from here on, and can't be marked so ({error.strerror or error})")
    return unmarked


def _holder(links: Sequence[ChainLink], name: str) -> int:
    """Return the number of the first checkpoint that has a tensor; -1 for none."""
    return next((at for at, link in enumerate(links) if name in link.tensors), -1)


def _fitting(rename: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the renames that fit a name; others would be refused."""
    return {
        here: there
        for here, there in rename.items()
        if any(name == here or name.startswith(f"{here}.") for name in names)
    }


def _paths(leaves: Any, before: str = "") -> Iterable[str]:
    if not isinstance(leaves, Mapping):
        yield before.removesuffix(".")
        return
    for key, one in leaves.items():
        yield from _paths(one, f"{before}{key}.")
