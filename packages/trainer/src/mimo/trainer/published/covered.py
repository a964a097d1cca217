"""What of a module a table of published tensors covers: whole parts, or none of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def left_whole(paths: Collection[str], covered: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is not covered: first keys of which nothing is, and paths of which the first key is covered."""
    known = {path.partition(".")[0] for path in covered}
    whole = dict.fromkeys(path.partition(".")[0] for path in paths if path.partition(".")[0] not in known)
    return tuple(whole), tuple(path for path in paths if path.partition(".")[0] in known)
