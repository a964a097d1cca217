"""A dataset of records, wherever these lie: tokens, weights and items of each, and every refusal with its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import attrs

from mimo.data.index import Origin, digest_of_text
from mimo.data.loading import is_read_failure, retried
from mimo.data.samples import DataPart, Tokenizer
from mimo.data.sources.bounded_cache import BoundedCache
from mimo.data.sources.images import image_size, load_image
from mimo.data.sources.record import Record, RecordError
from mimo.data.text import Chat, ChatError, ChatSettings, ChatTokens, Reference, template_source
from mimo.hooks import ConfigError, DataError, ItemInfo, RunError, UserError

if TYPE_CHECKING:
    from PIL import Image

# A step asks for the same few samples several times: tokens, items, pixels.
_CACHED_BYTES = 1 << 26
_READABLE = "a file system that can be read"
_MEND = "Mend it or take it out; of a dataset, `mimo data index --decode` lists all that can't be read."
_RECORD_BYTES = 1 << 10
"""What a record takes beside its text and the bytes of its items."""


class Records(Protocol):
    """Where the records of a dataset lie: what the author of a source writes. Reading decodes nothing."""

    def __len__(self) -> int:
        """Return the number of records."""

    @property
    def shards(self) -> Sequence[int]:
        """Return how many records each file has, in order, where those of a file are better read together."""

    def where(self, sample: int) -> str:
        """Return where a record comes from, for messages: ``train.jsonl:12``."""

    def read(self, sample: int) -> Record:
        """Return a record, see `parse_record` and `read_record`.

        Raises:
            RecordError: it is none.
            DataError: its conversation is none.
            OSError: it can't be read.
        """

    def origin(self) -> Origin:
        """Return where the records come from."""

    def item(self, sample: int, reference: str) -> Path | bytes:
        """Return the file that a record's reference means, or what it holds; bytes of the record are not asked for.

        Raises:
            DataError: the reference leaves what belongs to the data.
            ValueError: there is no such item; the message says why.
            OSError: likewise.
        """


class RecordDataset:
    """The samples of a source of records.

    Args:
        records: the source.
        tokenizer: of their texts.
        chat: how their conversations become tokens.
    """

    def __init__(self, records: Records, tokenizer: Tokenizer, chat: ChatSettings) -> None:
        self._records = records
        self._tokenizer = tokenizer
        self._chat_settings = chat
        self._chat = cache(partial(Chat, chat, tokenizer))
        self._records_read = BoundedCache(_CACHED_BYTES, _size_of)
        self._encoded = lru_cache(1)(self._encode)  # asked for its tokens, a sample is asked for its weights next

    def __len__(self) -> int:
        return len(self._records)

    def parts(self) -> Sequence[DataPart]:
        """Return the shards."""
        return (DataPart(name="", samples=len(self), shards=tuple(self._records.shards)),)

    def where(self, sample: int) -> str:
        """Return the place of a sample."""
        return self._records.where(sample)

    def origin(self) -> Origin:
        """Return where the samples come from."""
        origin = self._records.origin()
        return attrs.evolve(origin, template=partial(self._template, origin.template))

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the ids of the text and the end, or of a conversation, which its template ends."""
        return list(self._encoded(sample).ids)

    def weights(self, sample: int) -> Sequence[float] | None:
        """Return the sample's weight for each token that is learnt and 0 for others, None if each has 1."""
        weight, encoded = self._record(sample).weight, self._encoded(sample)
        if encoded.weights is None:
            return None if weight is None else [weight] * len(encoded.ids)
        return [(1.0 if weight is None else weight) * float(share) for share in encoded.weights]

    def ends(self, sample: int) -> Sequence[int] | None:
        """Return where turns of a conversation end, None for a text, which may be cut anywhere."""
        return self._encoded(sample).ends

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return the items, images with (height, width) from their headers, others with no size."""
        found = []
        for index, item in enumerate(self._record(sample).items):
            size = self._size(sample, item.reference) if item.modality == "image" else ()
            found.append(ItemInfo(sample=sample, index=index, modality=item.modality, size=size, role=item.role))
        return found

    def raw(self, sample: int, index: int) -> Image.Image | Path | bytes:
        """Return one image, decoded, so that damaged pixels are reported with their place, or what another is."""
        item = self._record(sample).items[index]
        held = self._item(sample, item.reference)
        if item.modality != "image":
            return held
        try:
            return load_image(held)
        except ValueError as error:
            raise self._unreadable(sample, item.reference, error) from error

    def _template(self, reading: Callable[[], str]) -> str:
        """Return a digest of what makes samples of records: the source's settings, the chat's, its template, if any."""
        settings = self._chat_settings
        return digest_of_text([reading(), attrs.asdict(settings), template_source(settings, self._tokenizer)])

    def _encode(self, sample: int) -> ChatTokens:
        record = self._record(sample)
        try:
            return self._tokens_of(record)
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

    def _tokens_of(self, record: Record) -> ChatTokens:
        if record.conversation is not None:
            return self._chat().encode(record.conversation)
        ids = [*self._tokenizer.encode(record.text), self._tokenizer.end]
        return ChatTokens(ids=ids, weights=None, ends=None)

    def _record(self, sample: int) -> Record:
        return self._records_read.get(sample, partial(self._read, sample))

    def _read(self, sample: int) -> Record:
        try:
            return retried(partial(self._records.read, sample))
        except RecordError as error:
            raise DataError(self.where(sample), expected=error.expected, got=error.got, fix=error.fix) from None
        except OSError as error:
            if is_read_failure(error):  # no fault of the record
                raise RunError(self.where(sample), expected=_READABLE, got=str(error)) from error
            raise DataError(self.where(sample), expected="a file that stays readable", got=str(error)) from error

    def _size(self, sample: int, reference: Reference) -> tuple[int, int]:
        item = self._item(sample, reference)
        try:
            return image_size(item)
        except (ValueError, OSError) as error:
            raise self._unreadable(sample, reference, error) from error

    def _item(self, sample: int, reference: Reference) -> Path | bytes:
        if isinstance(reference, bytes):
            return reference
        try:
            return retried(partial(self._records.item, sample, reference))
        except UserError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise self._unreadable(sample, reference, error) from error

    def _unreadable(self, sample: int, reference: Reference, error: Exception) -> UserError:
        said = repr(reference) if isinstance(reference, str) else f"{len(reference):,} bytes in the record"
        if is_read_failure(error):  # no fault of the item
            return RunError(self.where(sample), expected=_READABLE, got=f"{said}: {error}")
        return DataError(self.where(sample), expected="an item that can be read", got=f"{said}: {error}", fix=_MEND)


def _size_of(record: Record) -> int:
    turns = () if record.conversation is None else record.conversation.messages
    letters = len(record.text) + sum(len(turn.text) + _RECORD_BYTES for turn in turns)
    return _RECORD_BYTES + letters + sum(_RECORD_BYTES + len(item.reference) for item in record.items)


def path_inside(folder: Path, name: str, *, where: str, holder: str) -> Path:
    """Return the real path, links followed, of an item that is named relative to a folder and must lie in it.

    Args:
        folder: resolved.
        name: as the record has it.
        where: place of the record.
        holder: what paths are relative to, for the message: ``file``.

    Raises:
        DataError: it is absolute, or leaves the folder.
        OSError, RuntimeError, ValueError: circles of links, null bytes.
    """
    path = (folder / name).resolve()
    if Path(name).is_absolute() or not path.is_relative_to(folder):
        raise DataError(
            where,
            expected=f"paths relative to the {holder} and inside its folder {str(folder)!r}",
            got=f"{name!r}, which leaves it",
            fix=f"Move the item into the folder, or the {holder} above the items.",
        )
    return path
