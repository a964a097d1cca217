"""The blocks that a dataset is read in: each a file in a folder of its own until all are there and become the index.

A block's file says what it was made with. So a command that is started again has only those left that are missing, or
were made of other data or with other settings.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from mimo.data import (
    Dataset,
    IndexFileError,
    Origin,
    SampleSize,
    SampleSizes,
    SampleTokens,
    TokenArrays,
    arrays_of,
    arrays_of_tokens,
    check_arrays,
    digest_of_text,
    ends_of,
    read_arrays,
    sizes_of_arrays,
    tokens_of_arrays,
    weights_of,
    write_arrays,
    write_sizes,
    write_tokens,
)
from mimo.data.index.sizes import FORMAT
from mimo.hooks import ConfigError
from mimo.trainer.commands.indexing.examine import Broken, examine
from mimo.trainer.job.job import Job
from mimo.trainer.job.sample_index import (
    BROKEN,
    BROKEN_SAMPLES,
    ENCODING,
    EXTREMES,
    SIZES,
    TOKENS,
    IndexRules,
    index_path,
)

BLOCK = 4096
"""Samples of a block."""
_PARTIAL = f"{SIZES}.partial"
_LISTED = 5
"""Broken samples whose numbers stand in the index."""


@attrs.frozen(kw_only=True, eq=False)
class Blocks:
    """A dataset in blocks.

    Args:
        job: whose encoders, generators and limits hold.
        dataset: with sizes of all items.
        origin: of the dataset.
        rules: of the job.
        about: what the index is made with, see `IndexRules.about`.
        decodes: whether items are decoded and prepared.
        keeps_tokens: whether the ids of samples are kept, too.
        size: samples of a block.
    """

    job: Job
    dataset: Dataset
    origin: Origin
    rules: IndexRules
    about: Mapping[str, str]
    decodes: bool
    keeps_tokens: bool = False
    size: int = BLOCK

    @property
    def folder(self) -> Path:
        """Where the files of blocks are."""
        return index_path(self.origin, _PARTIAL)

    def samples(self, block: int) -> range:
        """Return the samples of a block."""
        return range(block * self.size, min((block + 1) * self.size, len(self.dataset)))

    def __len__(self) -> int:
        return (len(self.dataset) + self.size - 1) // self.size

    def missing(self) -> list[int]:
        """Return the blocks that are still to be read."""
        return [block for block in range(len(self)) if not self._is_there(block)]

    def read(self, block: int) -> SampleSizes:
        """Return the sizes of a block that is there."""
        return sizes_of_arrays(read_arrays(self._path(block)))

    def broken(self, block: int) -> bytes:
        """Return lines of JSON on what is broken in a block that is there."""
        return read_arrays(self._path(block)).arrays["lines"].tobytes()

    def make(self, block: int) -> int:
        """Read a block's samples and write its file; return how many are broken.

        Raises:
            UserError: a setting is wrong, so that no sample can be read.
            OSError: the file can't be written.
        """
        found, kept = list[tuple[SampleSize, tuple[Broken, ...]]](), list[SampleTokens]()
        for sample in self.samples(block):
            found.append(examine(self.job, self.dataset, sample, self.rules, decodes=self.decodes))
            if self.keeps_tokens:  # at once, while the dataset remembers what it has encoded
                kept.append(self._tokens(sample, found[-1][0]))
        lines = b"".join(broken.line() for _, all_broken in found for broken in all_broken)
        sizes = SampleSizes.of(self.rules.modalities, [size for size, _ in found])
        arrays: dict[str, Any] = {**arrays_of(sizes), "lines": np.frombuffer(lines, dtype=np.uint8)}
        if self.keeps_tokens:
            arrays |= arrays_of_tokens(TokenArrays.of(kept))
        write_arrays(self._path(block), arrays, self._about(block, sizes))
        return int(np.count_nonzero(sizes.broken))

    def _tokens(self, sample: int, size: SampleSize) -> SampleTokens:
        """Return the ids of a sample; of one that is broken none, as it is never asked for them."""
        if size.broken:
            return SampleTokens(ids=np.zeros(0, dtype=np.int32))
        ids = np.asarray(self.dataset.tokens(sample), dtype=np.int32)
        weights, ends = weights_of(self.dataset, sample), ends_of(self.dataset, sample)
        return SampleTokens(
            ids=ids,
            weights=None if weights is None else np.asarray(weights, dtype=np.float64).astype(np.float32),
            ends=None if ends is None else np.array(sorted({end for end in ends if end <= len(ids)}), np.int32),
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """Hold the folder, which is made if it isn't there, so that no other command fills it; yield what holds it.

        Raises:
            ConfigError: it can't be made, or another command holds it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise unwritable(self.origin, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield descriptor
        except BlockingIOError:
            raise ConfigError(
                self.origin.name,
                expected="no other `mimo data index` of these data",
                got=f"one that fills {str(self.folder)!r}",
                fix="Wait until it ends.",
            ) from None
        finally:
            os.close(descriptor)

    def join(self) -> SampleSizes:
        """Make the index of all blocks, which are there, and take these away; return it.

        Raises:
            ConfigError: it can't be written.
        """
        numbers = range(len(self))
        try:
            broken = self._write_broken(numbers)
            about = {
                **self.about,
                ENCODING: self.rules.encoding,
                EXTREMES: json.dumps(self._extremes(numbers)),
                BROKEN_SAMPLES: json.dumps(broken),
            }
            self._write_tokens(numbers)
            path = index_path(self.origin)
            write_sizes(path, numbers, self.read, about)
            shutil.rmtree(self.folder, ignore_errors=True)
        except OSError as error:
            raise unwritable(self.origin, error) from error
        return sizes_of_arrays(read_arrays(path))

    def _write_tokens(self, numbers: Sequence[int]) -> None:
        """Write the ids if they are kept; otherwise take away those of an earlier index."""
        path = index_path(self.origin, TOKENS)
        if self.keeps_tokens:
            about = {**self.about, **self.rules.about_ids}
            write_tokens(path, numbers, lambda block: tokens_of_arrays(read_arrays(self._path(block))), about)
        else:
            path.unlink(missing_ok=True)

    def _write_broken(self, numbers: Sequence[int]) -> tuple[int, list[int]]:
        """Write what is broken; return how many samples are, and the first of them."""
        path = index_path(self.origin, BROKEN)
        count, first = 0, list[int]()
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            for block in numbers:
                places = np.flatnonzero(self.read(block).broken)
                count += len(places)
                first += (places[: _LISTED - len(first)] + block * self.size).tolist()
                file.write(self.broken(block))
        if count:
            partial.replace(path)
        else:
            partial.unlink()
            path.unlink(missing_ok=True)
        return count, first

    def _extremes(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the items of each modality that have the fewest and the most rows, and losses."""
        found: dict[tuple[int, str, int], tuple[int, int]] = {}
        begin = 0
        for block in numbers:
            sizes = self.read(block)
            for modality in np.unique(sizes.modality).tolist():
                for name, used in (("rows", sizes.is_read()), ("losses", sizes.is_made())):
                    places = np.flatnonzero((sizes.modality == modality) & used)
                    counts = getattr(sizes, name)[places]
                    for sign in (1, -1) if len(places) else ():
                        place = int(np.argmin(sign * counts))
                        best = (sign * int(counts[place]), begin + int(places[place]))
                        key = modality, name, sign
                        found[key] = min(found.get(key, best), best)
            begin += len(sizes.modality)
        return sorted({item for _, item in found.values()})

    def _about(self, block: int, sizes: SampleSizes) -> dict[str, str]:
        modalities = json.dumps(sizes.modalities)
        return {**self._made, "block": str(block), "format": FORMAT, "modalities": modalities}

    @property
    def _made(self) -> dict[str, str]:
        """What blocks are made with, here by all settings of encoders and generators: no sizes are compared."""
        flags = {"size": self.size, "decodes": self.decodes, "tokens": self.keeps_tokens}
        made = {**self.about, ENCODING: self.rules.encoding, **{name: str(flag) for name, flag in flags.items()}}
        return {**made, **(self.rules.about_ids if self.keeps_tokens else {})}

    def _is_there(self, block: int) -> bool:
        try:
            stored = read_arrays(self._path(block))
            check_arrays(self._path(block))
            sizes = sizes_of_arrays(stored)
        except (OSError, IndexFileError):
            return False
        return stored.about == self._about(block, sizes) and len(sizes) == len(self.samples(block))

    def _path(self, block: int) -> Path:
        # Named by what they are made with: a process that outlives a command that was killed writes none of another's.
        return self.folder / f"{block:08}-{digest_of_text(self._made)[:12]}.block"


def unwritable(origin: Origin, error: OSError) -> ConfigError:
    """Return the refusal of a place where the index can't be written."""
    return ConfigError(
        "data.index",
        expected=f"a folder in which the index of {origin.name!r} can be written",
        got=f"{str(origin.index.parent)!r} ({error})",
        fix="Set data.index to a folder of yours; without it, that is where the data are.",
    )
