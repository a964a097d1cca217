"""What a checkpoint holds of the rerun machine, as it is read: refused by file and key where it is something else.

A checkpoint's checksums show damage, not what somebody else has written there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mimo.checkpoint import Manifest
from mimo.hooks import CheckpointError
from mimo.trainer.rerun.pending import PendingStep

_FIX = "Load another checkpoint."
_MAX_WHOLE = 2**1000  # what still is a float
_NO_WAITING = (AttributeError, KeyError, TypeError, ValueError)
"""What reading anything else as a `PendingStep` raises."""


def check_state(known: Any, step_folder: Path) -> None:
    """Refuse what is not the state of the machine, of however many ranks.

    Args:
        known: the value ``rerun.state`` of a checkpoint.
        step_folder: of the checkpoint.

    Raises:
        CheckpointError: naming the folder and the key.
    """
    where = f"{step_folder}: rerun.state"
    if not isinstance(known, Mapping):
        raise _refused(where, "a table", known)
    for key in ("losses", "norms", "measured", "waiting"):
        if key not in known:
            raise _refused(where, f"the key {key!r}", sorted(map(str, known)))
    for key in ("losses", "norms"):
        if not isinstance(known[key], list) or not all(_is_number(one) for one in known[key]):
            raise _refused(f"{where}.{key}", "a list of numbers", known[key])
    if not _is_number(known["measured"]) or not 0 <= known["measured"] < math.inf:
        raise _refused(f"{where}.measured", "a finite number of 0 or more", known["measured"])
    if known["waiting"] is not None:
        _check_waiting(known["waiting"], f"{where}.waiting")


def check_devices(waiting: Mapping[str, Any], step_folder: Path, *, world: int) -> None:
    """Refuse a step that waits to be run again, but not with a device for each rank of the run.

    Raises:
        CheckpointError: naming the folder and the key.
    """
    if len(waiting["devices"]) != world:
        raise _refused(f"{step_folder}: rerun.state.waiting.devices", f"those of {world} ranks", waiting["devices"])


def record_bytes(manifest: Manifest, entry: str, step_folder: Path) -> int | None:
    """Return how many bytes a checkpoint holds of a rank's record, None where it has no such entry.

    Raises:
        CheckpointError: they are more than its files hold, naming the folder and the key.
    """
    found = manifest.tensors.get(entry)
    if found is None:
        return None
    size = math.prod(found.shape)
    # A link, be it to itself, counts as what it is: no shard is read through one.
    if size > sum(path.lstat().st_size for path in step_folder.glob("*.safetensors")):
        raise CheckpointError(f"{step_folder}: {entry}", expected="as many bytes as its files hold", got=f"{size}")
    return size


def _check_waiting(plain: Any, where: str) -> None:
    try:
        waiting = PendingStep.read(plain)
    except _NO_WAITING as error:
        raise _refused(where, f"a step that waits ({type(error).__name__}: {error})", plain) from error
    computation = waiting.computation
    judged = (
        ("step", _is_whole(waiting.step) and waiting.step >= 1),
        ("layout", isinstance(waiting.layout, str)),
        ("reason", isinstance(waiting.reason, str)),
        ("tolerance", _is_number(waiting.tolerance) and waiting.tolerance >= 0),
        ("ranks", all(_is_whole(rank) and 0 <= rank < len(waiting.devices) for rank in waiting.ranks)),
        (
            "deed",
            computation is None
            or (
                isinstance(computation.kind, str)
                and isinstance(computation.module, str)
                and all(map(_is_whole, computation.microbatches))
            ),
        ),
        (
            "devices",
            all(each and all(isinstance(one, str) for one in each) for each in waiting.devices),
        ),
        ("values", isinstance(waiting.values, Mapping) and all(map(_is_shown_number, waiting.values.values()))),
    )
    for key, is_right in judged:
        if not is_right:
            raise _refused(f"{where}.{key}", "what a run has saved", plain.get(key))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (_is_whole(value) and abs(value) <= _MAX_WHOLE)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_shown_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, str)


def _refused(where: str, expected: str, got: Any) -> CheckpointError:
    return CheckpointError(where, expected=expected, got=repr(got), fix=_FIX)
