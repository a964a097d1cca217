"""Ids of samples as flat arrays, so that no run has to read and encode texts again.

N samples, S ids of one of them, T of all, R runs of ids of one weight, E places where samples may be cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from mimo.data.index.store import (
    IndexFileError,
    StoredArrays,
    are_offsets,
    joined_blocks,
    span_of,
    write_arrays,
)

FORMAT = "mimo tokens 1"
_OFFSETS: Mapping[str, str] = {"first_id": "id", "first_run": "run", "first_end": "end"}
"""Arrays ``[N + 1]``, and which one each cuts into samples."""
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(_OFFSETS, "<i8"),
    "id": "<i4",
    "run": "<i4",
    "run_weight": "<f4",
    "end": "<i4",
    "check": "<i8",
}


@attrs.frozen(kw_only=True, eq=False)
class SampleTokens:
    """What a dataset says of the ids of one sample.

    Args:
        ids: ``[S]``, a placeholder one of them.
        weights: ``[S]`` of each; None where each is 1.
        ends: how many ids a cut sample may have, ascending; None: any number.
    """

    ids: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None
    ends: NDArray[np.int32] | None = None


@attrs.frozen(kw_only=True, eq=False)
class TokenArrays:
    """The ids of N samples; those of sample ``n`` are ``id[first_id[n]:first_id[n + 1]]``.

    Args:
        first_id, first_run, first_end: ``[N + 1]``, from 0 to T, R and E.
        id: ``[T]``.
        run: ``[R]`` how many ids each run has; a sample without weights has none.
        run_weight: ``[R]`` their weight.
        end: ``[E]``; of a sample that may be cut anywhere none, and of the others a 0 before their own.
        check: ``[N]`` checksum of each sample, as pages are read one by one.
    """

    first_id: NDArray[np.int64]
    first_run: NDArray[np.int64]
    first_end: NDArray[np.int64]
    id: NDArray[np.int32]
    run: NDArray[np.int32]
    run_weight: NDArray[np.float32]
    end: NDArray[np.int32]
    check: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.check)

    @classmethod
    def of(cls, samples: Sequence[SampleTokens]) -> TokenArrays:
        """Return the arrays of samples."""
        runs = [_runs(sample.weights) for sample in samples]
        ends = [[] if sample.ends is None else [0, *sample.ends.tolist()] for sample in samples]
        parts: dict[str, list[NDArray[Any]]] = {
            "id": [sample.ids for sample in samples],
            "run": [lengths for lengths, _ in runs],
            "run_weight": [weights for _, weights in runs],
            "end": [np.array(own, dtype=np.int32) for own in ends],
        }
        arrays: dict[str, Any] = {
            name: np.concatenate([np.zeros(0, dtype=_KINDS[name]), *own]) for name, own in parts.items()
        }
        for name, cut in _OFFSETS.items():
            arrays[name] = np.cumsum([0, *map(len, parts[cut])], dtype=np.int64)
        return cls(**arrays, check=np.array([_checksum(*own) for own in zip(*parts.values(), strict=True)], np.int64))

    def __getitem__(self, sample: int) -> SampleTokens:
        """Return one sample.

        Raises:
            IndexFileError: it is not what was written.
        """
        ids = self.id[slice(*span_of(self.first_id, sample, len(self.id)))]
        runs = slice(*span_of(self.first_run, sample, len(self.run)))
        run, weight = self.run[runs], self.run_weight[runs]
        end = self.end[slice(*span_of(self.first_end, sample, len(self.end)))]
        if _checksum(ids, run, weight, end) != self.check[sample]:
            msg = f"the ids of sample {sample} differ from their checksum"
            raise IndexFileError(msg)
        if len(run) and (run.min() < 0 or run.sum(dtype=np.int64) != len(ids)):
            msg = f"sample {sample} has {len(ids)} ids, and weights of others"
            raise IndexFileError(msg)
        ends = end[1:] if len(end) else None
        if ends is not None and not _are_ends(ends, len(ids)):
            msg = f"sample {sample} has {len(ids)} ids, and may be cut where none is"
            raise IndexFileError(msg)
        return SampleTokens(ids=ids, weights=weight.repeat(run) if len(run) else None, ends=ends)


def write_tokens(
    path: Path, blocks: Sequence[int], read: Callable[[int], TokenArrays], about: Mapping[str, str]
) -> None:
    """Write the ids of blocks of samples as those of all, with one block in memory at a time.

    Args:
        path: of the file.
        blocks: numbers of the blocks, in order; at least one.
        read: returns one of them.
        about: texts for the file.

    Raises:
        OSError: the file can't be written.
    """
    pieces = joined_blocks(blocks, lambda number: arrays_of_tokens(read(number)), _KINDS, _OFFSETS)
    write_arrays(path, pieces, {"format": FORMAT, **about})


def arrays_of_tokens(tokens: TokenArrays) -> dict[str, NDArray[Any]]:
    """Return the arrays of samples by their names."""
    return {name: getattr(tokens, name) for name in _KINDS}


def tokens_of_file(stored: StoredArrays) -> TokenArrays:
    """Return the ids that a file of `write_tokens` holds, raising as `tokens_of_arrays`."""
    if stored.about.get("format") != FORMAT:
        msg = "it holds no ids of samples"
        raise IndexFileError(msg)
    return tokens_of_arrays(stored)


def tokens_of_arrays(stored: StoredArrays) -> TokenArrays:
    """Return the ids that are among the arrays of a file, of which nothing is read yet.

    Raises:
        IndexFileError: it holds other arrays, or such as contradict each other.
    """
    try:
        arrays: dict[str, Any] = {name: np.asarray(stored.arrays[name]) for name in _KINDS}
    except KeyError as error:
        msg = f"it lacks what ids of samples have ({error!r})"
        raise IndexFileError(msg) from None
    wrong = [name for name, kind in _KINDS.items() if arrays[name].dtype != kind or arrays[name].ndim != 1]
    wrong += [
        name for name, cut in _OFFSETS.items() if not are_offsets(arrays[name], len(arrays["check"]), len(arrays[cut]))
    ]
    if wrong or len(arrays["run"]) != len(arrays["run_weight"]):
        msg = f"its arrays contradict each other: {', '.join(wrong or ['run', 'run_weight'])}"
        raise IndexFileError(msg)
    return TokenArrays(**arrays)


def _runs(weights: NDArray[np.float32] | None) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return how many ids one after another have one weight, and that weight; without weights none."""
    if weights is None:
        return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
    if not len(weights):
        return np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
    firsts = np.flatnonzero(np.concatenate([[True], weights[1:] != weights[:-1]]))
    return np.diff(firsts, append=len(weights)).astype(np.int32), weights[firsts]


def _are_ends(ends: NDArray[np.int32], count: int) -> bool:
    """Tell whether these are numbers of ids out of so many, ascending."""
    return not len(ends) or bool(ends[0] >= 0 and ends[-1] <= count and (ends[1:] > ends[:-1]).all())


def _checksum(*arrays: NDArray[Any]) -> int:
    found = 0
    for array in arrays:
        found = zlib.crc32(array.data, found)
    return found
