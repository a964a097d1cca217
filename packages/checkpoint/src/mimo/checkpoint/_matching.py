"""What is asked of a checkpoint against what it holds: names under their other names, and all that does not fit."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import torch

from mimo.checkpoint._manifest import Manifest
from mimo.checkpoint._tensors import CODES
from mimo.checkpoint._tree import Flat
from mimo.checkpoint._wire import Wire
from mimo.hooks import CheckpointError, Common, Owned

_GLOB = frozenset("*?[")


@attrs.frozen(kw_only=True)
class Wish:
    """How a tree is to be matched with a checkpoint; see `mimo.checkpoint.load`."""

    rename: Mapping[str, str]
    may_lack: Sequence[str]
    refuse_left: bool
    may_leave: Sequence[str]

    def prefix_of(self, name: str) -> str | None:
        """Return the longest renamed prefix that ``name`` is or begins with, None without one."""
        found = [prefix for prefix in self.rename if name == prefix or name.startswith(f"{prefix}.")]
        return max(found, key=len, default=None)

    def there(self, name: str) -> str:
        """Return the name in the checkpoint of what has ``name`` here."""
        prefix = self.prefix_of(name)
        return name if prefix is None else self.rename[prefix] + name[len(prefix) :]


@attrs.frozen(kw_only=True)
class Request:
    """What one rank asks of a checkpoint.

    Args:
        identity: the checkpoint that this rank sees.
        names: the name there of each name here.
        lacking: names here that the checkpoint lacks and may lack.
        misfits: what it can't be given and why, by name here.
        renamed: each prefix that is to be renamed, and whether a name of this rank begins with it.
        place: where it runs; see `own_place`.
    """

    identity: str
    names: Mapping[str, str]
    lacking: frozenset[str]
    misfits: Mapping[str, str]
    renamed: Mapping[str, bool]
    place: str


def _unpack_request(packed: dict[str, Any]) -> Request:
    return Request(**{**packed, "lacking": frozenset(packed["lacking"])})


REQUESTS = Wire(lambda request: {**attrs.asdict(request), "lacking": sorted(request.lacking)}, _unpack_request)


def make_request(manifest: Manifest, flat: Flat, wish: Wish, *, place: str) -> Request:
    """Compare the leaves of one rank, which runs at ``place``, with the checkpoint."""
    names = {name: wish.there(name) for name in (*flat.tensors, *flat.values)}
    lacking = frozenset(
        name for name, there in names.items() if there not in manifest.names and matches(name, wish.may_lack)
    )
    messages = {name: _compare_tensor(manifest, names[name], tensor) for name, tensor in flat.tensors.items()}
    messages |= {name: _compare_value(manifest, names[name], leaf, wish) for name, leaf in flat.values.items()}
    used = {wish.prefix_of(name) for name in names}
    return Request(
        identity=manifest.identity,
        names=names,
        lacking=lacking,
        misfits={
            name: text if name == names[name] else f"{text} (there: {names[name]})"
            for name, text in messages.items()
            if text and name not in lacking
        },
        renamed={prefix: prefix in used for prefix in wish.rename},
        place=place,
    )


def check_requests(requests: Sequence[Request], manifest: Manifest, where: str, wish: Wish) -> frozenset[str]:
    """Return the names of the checkpoint that no rank asks for.

    Raises:
        CheckpointError: lists everything of all ranks that does not fit.
    """
    if len({request.identity for request in requests}) > 1:
        raise CheckpointError(where, expected="the same checkpoint on every rank", got="different manifests")
    misfits = {(name, text) for request in requests for name, text in request.misfits.items()}
    misfits |= _find_useless(requests)
    readers: dict[str, set[str]] = {}
    for here, there in (pair for request in requests for pair in request.names.items()):
        readers.setdefault(there, set()).add(here)
    misfits |= {
        (there, f"asked for under several names: {', '.join(sorted(heres))}")
        for there, heres in readers.items()
        if len(heres) > 1
    }
    left = manifest.names - readers.keys()
    if wish.refuse_left:
        refused = (name for name in left if not matches(name, wish.may_leave))
        misfits |= {(name, "unexpected: in the checkpoint, not asked for") for name in refused}
    if misfits:
        lines = "".join(f"\n  {name}: {text}" for name, text in sorted(misfits))
        raise CheckpointError(
            where,
            expected="every entry that is asked for, with its dtype and shape",
            got=f"{len(misfits)} that do not fit:{lines}\n",
            fix="Nothing was changed. Load it with the config that it was saved with, or allow for these by may_lack, "
            "may_leave or rename.",
        )
    return left


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether any of ``patterns`` is ``name`` or a glob that means it; there may be thousands that are names."""
    return name in patterns or any(
        not _GLOB.isdisjoint(pattern) and fnmatch.fnmatchcase(name, pattern) for pattern in patterns
    )


def _find_useless(requests: Sequence[Request]) -> set[tuple[str, str]]:
    """Return the renamed prefixes that no name of any rank has."""
    used = {prefix for request in requests for prefix, is_used in request.renamed.items() if is_used}
    given = {prefix for request in requests for prefix in request.renamed}
    return {(f"rename {prefix!r}", "no name that is asked for begins so") for prefix in given - used}


def _compare_tensor(manifest: Manifest, there: str, tensor: torch.Tensor) -> str:
    entry = manifest.tensors.get(there)
    if entry is None:
        return "a JSON value in the checkpoint, a tensor here" if there in manifest.names else "missing"
    differences = []
    if entry.dtype != CODES[tensor.dtype]:
        differences.append(f"dtype {entry.dtype} in the checkpoint, {CODES[tensor.dtype]} here")
    if entry.shape != tuple(tensor.shape):
        differences.append(f"shape {list(entry.shape)} in the checkpoint, {list(tensor.shape)} here")
    return "; ".join(differences)


def _compare_value(manifest: Manifest, there: str, leaf: Common | Owned, wish: Wish) -> str:
    here = f"owned by {leaf.module!r}" if isinstance(leaf, Owned) else "common"
    if there in manifest.tensors:
        return f"a tensor in the checkpoint, {here} here"
    if there not in manifest.names:
        return "missing"
    owner = manifest.owned[there].module if there in manifest.owned else None
    expected = wish.there(leaf.module) if isinstance(leaf, Owned) else None  # a renamed module owns its values still
    there_is = "common" if owner is None else f"owned by {owner!r}"
    return "" if owner == expected else f"{there_is} in the checkpoint, {here} here"
