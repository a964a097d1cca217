"""The jsonl dataset, a user's own data: lines of ``{"images": ["a.png", …], "text": "… <image> …"}``, or conversations.

A conversation is ``{"messages": [{"role": "user", "content": …}, …]}``; see `mimo.data.text.chat`.

Beside ``images`` there may be ``audio``, and ``items`` with the files of other modalities: ``{"sonar": ["a.bin", …]}``.
These are read by whoever encodes them. ``weight`` is how much each token of the sample counts in the loss, 1 without
it. Only the lines' offsets are held; a line is parsed, an image opened and its pixels decoded when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from mimo.data.index import Origin, digest_of_file, index_place
from mimo.data.samples import DatasetSpec, SplitName, Tokenizer
from mimo.data.sources.record import Record, RecordError, parse_record
from mimo.data.sources.record_dataset import RecordDataset, path_inside
from mimo.data.text import ChatSettings
from mimo.hooks import ConfigError, hookimpl

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_LINE = 1 << 28
"""Bytes of a line that is parsed."""
BLOCK = 1 << 24
"""Bytes that are searched for line ends at once."""
_SPACE = np.frombuffer(b" \t\r\n\x0b\x0c", dtype=np.uint8)
"""What a blank line may begin with."""


@attrs.frozen(kw_only=True)
class JsonlConfig:
    """Settings of ``data.plugin = "jsonl"``.

    Args:
        path: the training samples; blank lines are skipped.
        evaluation_path: the samples of evaluations; without it there are none.
        index: a folder for what `mimo data index` finds; empty: beside the data.
        chat: how conversations become tokens.
    """

    path: str
    evaluation_path: str | None = None
    index: str = ""
    chat: ChatSettings = attrs.field(factory=ChatSettings)


@attrs.frozen(kw_only=True, eq=False)
class Lines:
    """The lines of one file that hold something; paths of items are relative to its folder and stay inside it.

    Args:
        path: of the file.
        folder: that it lies in, links followed.
        starts: ``[N]`` byte at which each of them begins.
        stops: ``[N]`` byte after its end, the line's end included.
        numbers: ``[N]`` of each in the file, from 1.
        index: see `Origin`.
    """

    path: str
    folder: Path
    index: Path
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def shards(self) -> Sequence[int]:
        """Return none: it is one file."""
        return ()

    def where(self, sample: int) -> str:
        """Return the file and line of a sample."""
        return f"{self.path}:{self.numbers[sample]}"

    def origin(self) -> Origin:
        """Return the file."""
        return Origin(name=self.path, index=self.index, digest=partial(digest_of_file, Path(self.path)))

    def read(self, sample: int) -> Record:
        """Return the record of a line."""
        # Opened each time: a handle shared by forked processes would share its position. Not mapped either: a file
        # cut short while it is mapped ends the process by a signal, where reading it gives an error.
        start, stop = int(self.starts[sample]), int(self.stops[sample])
        if stop - start > MAX_LINE:
            raise RecordError(expected=f"a line of at most {MAX_LINE:,} bytes", got=f"one of {stop - start:,}")
        with Path(self.path).open("rb", buffering=0) as file:
            file.seek(start)
            return parse_record(file.read(stop - start), self.where(sample))

    def item(self, sample: int, reference: str) -> Path:
        """Return the path of an item inside the file's folder."""
        return path_inside(self.folder, reference, where=self.where(sample), holder="file")


def find_lines(path: Path, index: str = "") -> Lines:
    """Return the lines of a file that hold something.

    Args:
        path: of the file.
        index: see `JsonlConfig`.

    Raises:
        OSError: it can't be read.
    """
    found = [np.zeros(1, dtype=np.int64)]
    doubtful: list[NDArray[np.int64]] = []
    size = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            letters = np.frombuffer(block, dtype=np.uint8)
            begins = np.flatnonzero(letters == ord("\n")) + (size + 1)
            first = np.concatenate([found[-1][-1:], begins]) if found[-1][-1:] == size else begins
            first = first[first < size + len(block)]
            doubtful.append(first[np.isin(letters[first - size], _SPACE)])
            found += [begins] if len(begins) else []
            size += len(block)
        starts = np.concatenate(found)
        starts = starts[starts < size]
        stops = np.append(starts[1:], size)[: len(starts)]
        is_kept = np.ones(len(starts), dtype=np.bool_)
        for line in np.searchsorted(starts, np.concatenate([starts[:0], *doubtful])).tolist():
            file.seek(int(starts[line]))
            is_kept[line] = bool(file.read(int(stops[line] - starts[line])).strip())
    kept = np.flatnonzero(is_kept)
    return Lines(
        path=str(path),
        folder=path.parent.resolve(),
        index=index_place(str(path), index),
        starts=starts[kept],
        stops=stops[kept],
        numbers=kept + 1,
    )


def open_jsonl(config: JsonlConfig, tokenizer: Tokenizer, split: SplitName) -> RecordDataset | None:
    """Return one split; see `DatasetSpec`."""
    if split == "train":
        setting, path = "data.path", config.path
    elif config.evaluation_path is None:
        return None
    else:
        setting, path = "data.evaluation_path", config.evaluation_path
    # Not `open` alone: a folder has its own error, and a named pipe would wait forever.
    if not Path(path).is_file():
        raise ConfigError(
            setting,
            expected="an existing jsonl file",
            got=repr(path),
            fix="Check the path; it is relative to the folder in which the command runs.",
        )
    try:
        lines = find_lines(Path(path), config.index)
    except OSError as error:
        raise ConfigError(setting, expected="a readable jsonl file", got=f"{path!r} ({error})") from error
    if not len(lines):
        raise ConfigError(setting, expected="a jsonl file with at least one sample", got=f"{path!r}, which is empty")
    return RecordDataset(lines, tokenizer, config.chat)


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``jsonl``."""
    return [DatasetSpec(name="jsonl", config=JsonlConfig, open=open_jsonl, encodes_samples=True)]
