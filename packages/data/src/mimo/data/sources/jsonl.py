"""The jsonl dataset, a user's own data: lines of ``{"images": ["a.png", …], "text": "… <image> …"}``, or conversations.

A conversation is ``{"messages": [{"role": "user", "content": …}, …]}``; see `mimo.data.text.chat`.

Beside ``images`` there may be ``audio``, and ``items`` with the files of other modalities: ``{"sonar": ["a.bin", …]}``.
These are read by whoever encodes them. ``weight`` is how much each token of the sample counts in the loss, 1 without
it. Only the lines' offsets are held; a line is parsed, an image opened and its pixels decoded when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from mimo.data.loading import is_read_failure
from mimo.data.samples import DatasetSpec, SplitName, Tokenizer
from mimo.data.sources.images import image_size, load_image
from mimo.data.sources.jsonl_line import Line, LineError, parse_line
from mimo.data.text import Chat, ChatError, ChatSettings, ChatTokens, Reference
from mimo.hooks import ConfigError, DataError, ItemInfo, RunError, UserError, hookimpl

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

# A step asks for the same few samples several times: tokens, items, pixels.
_CACHED_SAMPLES = 256


@attrs.frozen(kw_only=True)
class JsonlConfig:
    """Settings of ``data.plugin = "jsonl"``.

    Args:
        path: the training samples; blank lines are skipped.
        evaluation_path: the samples of evaluations; without it there are none.
        chat: how conversations become tokens.
    """

    path: str
    evaluation_path: str | None = None
    chat: ChatSettings = attrs.field(factory=ChatSettings)


class JsonlDataset:
    """The samples of one file; paths of items are relative to its folder and stay inside it."""

    def __init__(
        self,
        path: str,
        offsets: NDArray[np.int64],
        lines: NDArray[np.int64],
        tokenizer: Tokenizer,
        chat: ChatSettings,
    ) -> None:
        self._path = path
        self._folder = Path(path).parent.resolve()
        self._offsets = offsets
        self._lines = lines
        self._tokenizer = tokenizer
        self._chat = cache(partial(Chat, chat, tokenizer))
        self._line = lru_cache(_CACHED_SAMPLES)(self._read_line)
        self._encoded = lru_cache(1)(self._encode)  # asked for its tokens, a sample is asked for its weights next

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, sample: int) -> str:
        """Return the file and line of a sample."""
        return f"{self._path}:{self._lines[sample]}"

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of the text and the end, or of a conversation, which its template ends."""
        return list(self._encoded(sample).ids)

    def weights(self, sample: int) -> Sequence[float] | None:
        """Return the sample's weight for each token that is learnt and 0 for others, None if each has 1."""
        weight, encoded = self._line(sample).weight, self._encoded(sample)
        if encoded.weights is None:
            return None if weight is None else [weight] * len(encoded.ids)
        return [(1.0 if weight is None else weight) * float(share) for share in encoded.weights]

    def ends(self, sample: int) -> Sequence[int] | None:
        """Return where turns of a conversation end, None for a text, which may be cut anywhere."""
        return self._encoded(sample).ends

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the items, images with (height, width) from their headers, others with no size."""
        found = []
        for index, (modality, name) in enumerate(self._line(sample).items):
            size = self._size(sample, name) if modality == "image" else ()
            found.append(ItemInfo(sample=sample, index=index, modality=modality, size=size))
        return found

    def raw(self, sample: int, index: int) -> Image.Image | Path | bytes:
        """Return one image, decoded, so that damaged pixels are reported with file and line, or what another is."""
        modality, name = self._line(sample).items[index]
        path = self._inside(sample, name)
        if modality != "image":
            return path
        try:
            return load_image(path)
        except ValueError as error:
            raise self._unreadable(sample, name, error) from error

    def _encode(self, sample: int) -> ChatTokens:
        line = self._line(sample)
        try:
            if line.conversation is not None:
                return self._chat().encode(line.conversation)
            ids = [*self._tokenizer.encode(line.text), self._tokenizer.end]
            return ChatTokens(ids=ids, weights=None, ends=None)
        except ChatError as error:
            raise DataError(
                self.where(sample), expected="a conversation that can be encoded", got=str(error)
            ) from error
        except ConfigError:
            raise
        except ValueError as error:
            raise DataError(
                self.where(sample),
                expected="text that the tokenizer can encode",
                got=str(error),
                fix="Change the text or the tokenizer.",
            ) from error

    def _read_line(self, sample: int) -> Line:
        try:
            # Opened each time: a handle shared by forked processes would share its position.
            with Path(self._path).open("rb") as file:
                file.seek(self._offsets[sample])
                return parse_line(file.readline(), self.where(sample))
        except LineError as error:
            raise DataError(self.where(sample), expected=error.expected, got=error.got, fix=error.fix) from None
        except OSError as error:
            raise DataError(self.where(sample), expected="a file that stays readable", got=str(error)) from error

    def _size(self, sample: int, name: Reference) -> tuple[int, int]:
        path = self._inside(sample, name)
        try:
            return image_size(path)
        except (ValueError, OSError) as error:
            raise self._unreadable(sample, name, error) from error

    def _inside(self, sample: int, name: Reference) -> Path | bytes:
        """Return the bytes of an item, or its real path, links followed, which must lie in the file's folder."""
        if isinstance(name, bytes):
            return name
        try:
            path = (self._folder / name).resolve()
            inside = not Path(name).is_absolute() and path.is_relative_to(self._folder)
        except (OSError, RuntimeError, ValueError) as error:  # circles of links; null bytes in names
            raise self._unreadable(sample, name, error) from error
        if not inside:
            raise DataError(
                self.where(sample),
                expected=f"paths relative to the file and inside its folder {str(self._folder)!r}",
                got=f"{name!r}, which leaves it",
                fix="Move the item into the folder, or the file above the items.",
            )
        return path

    def _unreadable(self, sample: int, name: Reference, error: Exception) -> UserError:
        said = repr(name) if isinstance(name, str) else f"{len(name):,} bytes of a data URL"
        if is_read_failure(error):  # no fault of the item
            return RunError(self.where(sample), expected="a file system that can be read", got=f"{said}: {error}")
        return DataError(self.where(sample), expected="an item that can be read", got=f"{said}: {error}")


def open_jsonl(config: JsonlConfig, tokenizer: Tokenizer, split: SplitName) -> JsonlDataset | None:
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
    offsets: list[int] = []
    lines: list[int] = []
    offset = 0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    offsets.append(offset)
                    lines.append(number)
                offset += len(line)
    except OSError as error:
        raise ConfigError(setting, expected="a readable jsonl file", got=f"{path!r} ({error})") from error
    if not offsets:
        raise ConfigError(setting, expected="a jsonl file with at least one sample", got=f"{path!r}, which is empty")
    places = np.array(offsets, dtype=np.int64), np.array(lines, dtype=np.int64)
    return JsonlDataset(path, *places, tokenizer, config.chat)


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``jsonl``."""
    return [DatasetSpec(name="jsonl", config=JsonlConfig, open=open_jsonl, encodes_samples=True)]
