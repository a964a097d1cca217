"""The index of a dataset's sizes as a job needs it: what it must have been made with, and whether it was.

Rows are not compared by an encoder's settings, most of which change none, but as they are: the encoder says again how
many rows some of the index's items become, those with the fewest and the most among them. So does a generator of the
losses that it has of items.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from mimo.data import (
    Dataset,
    DatasetIndex,
    IndexFileError,
    ItemSize,
    JoinedIndex,
    MadeItem,
    Origin,
    PlacedItem,
    SampleSizes,
    TokenArrays,
    Tokenizer,
    check_arrays,
    digest_of_text,
    origin_of,
    read_arrays,
    sizes_of_arrays,
    sources_of,
    tokens_of_file,
)
from mimo.hooks import DataError, ItemInfo
from mimo.model import EncoderSpec, GeneratorSpec
from mimo.trainer.config.structure import unstructure
from mimo.trainer.job.job import JobModule

SIZES, TOKENS, BROKEN = ".sizes", ".tokens", ".broken"
"""Suffixes of the files of an index: its arrays, ids if they are kept, and lines of JSON on what is broken."""
EXTREMES = "extremes"
"""Text in the file: numbers of the items with the fewest and the most rows and losses."""
BROKEN_SAMPLES = "broken_samples"
"""Text in the file: number of broken samples, and those of the first of them."""
ENCODING = "encoding"
"""Text in the file: digest of all settings of encoders and generators."""
_CHANGED: Mapping[str, str] = {
    "data": "the data",
    "tokenizer": "the tokenizer",
    "template": "the template of conversations or settings by which samples are read",
    "encoders": "the encoders",
    "generators": "the generators",
    "max_tokens": "data.max_tokens",
    "placeholders": "the ids of placeholders, which follow from the order of modules",
}
_RUNS, _RUN = 16, 32
"""Items that are compared: so many in a row, at so many places."""


@attrs.frozen(kw_only=True)
class IndexRules:
    """What of a job's settings decides the sizes of samples.

    Args:
        tokenizer: digest of its plugin, settings and files.
        encoders: plugin of each modality that is read.
        generators: likewise of each that is made.
        encoding: digest of all their settings.
        rows: of each modality that is read, the rows of an item by its size.
        losses: of each modality that is made, the losses of an item by its size.
        made: likewise, how a sample holds an item of it.
        max_tokens: rows of a sample at most.
        end: id of the tokenizer's end.
        placeholders: id of the placeholder of each modality.
    """

    tokenizer: str
    encoders: Mapping[str, str]
    generators: Mapping[str, str]
    encoding: str
    rows: Mapping[str, Callable[[tuple[int, ...]], int]]
    losses: Mapping[str, Callable[[tuple[int, ...]], int]]
    made: Mapping[str, MadeItem]
    max_tokens: int
    end: int
    placeholders: Mapping[str, int]

    @classmethod
    def of(
        cls, modules: Sequence[JobModule], tokenizer: Tokenizer, *, settings: Mapping[str, Any], max_tokens: int
    ) -> IndexRules:
        """Return the rules of a job; ``settings`` are all of the tokenizer's table, as plain data."""
        encoders = {
            each.modality: each for each in modules if isinstance(each.spec, EncoderSpec) and each.feeds_language
        }
        generators = {each.modality: each for each in modules if each.is_generator}
        encoding = {modality: unstructure(each.config) for modality, each in encoders.items()}
        encoding |= {f"{modality} made": unstructure(each.config) for modality, each in generators.items()}
        return cls(
            tokenizer=digest_of_text(_with_files(settings)),
            encoders={modality: encoder.spec.name for modality, encoder in encoders.items()},
            generators={modality: generator.spec.name for modality, generator in generators.items()},
            encoding=digest_of_text(encoding),
            rows={
                modality: partial(encoder.spec.rows, encoder.config)
                for modality, encoder in encoders.items()
                if isinstance(encoder.spec, EncoderSpec)
            },
            losses={
                modality: partial(generator.spec.targets, generator.config)
                for modality, generator in generators.items()
                if isinstance(generator.spec, GeneratorSpec)
            },
            made={modality: generator.made_item for modality, generator in generators.items()},
            max_tokens=max_tokens,
            end=tokenizer.end,
            placeholders={modality: tokenizer.placeholder(modality) for modality in sorted({*encoders, *generators})},
        )

    def about(self, origin: Origin) -> dict[str, str]:
        """Return what an index of data is made with, by name; of what the model has none of nothing."""
        found = {
            "data": origin.digest(),
            "tokenizer": self.tokenizer,
            "template": origin.template(),
            "encoders": digest_of_text(sorted(self.encoders.items())),
            "max_tokens": str(self.max_tokens),
        }
        if self.generators:
            made = [
                [modality, plugin, attrs.asdict(self.made[modality])] for modality, plugin in self.generators.items()
            ]
            found["generators"] = digest_of_text(sorted(made))
        return found

    @property
    def about_ids(self) -> dict[str, str]:
        """What kept ids are made with besides."""
        return {"placeholders": json.dumps(self.placeholders)}

    @property
    def modalities(self) -> list[str]:
        """What is read or made, in order."""
        return sorted({*self.rows, *self.losses})

    def uses(self, info: ItemInfo | ItemSize) -> tuple[bool, bool]:
        """Tell whether the model reads an item, and whether it makes it."""
        role = info.role or ("input" if info.modality in self.rows else "output")
        return role != "output" and info.modality in self.rows, role != "input" and info.modality in self.losses

    def rows_of(self, info: ItemInfo | ItemSize) -> int:
        """Return the rows of an item, 0 if it isn't read."""
        return _count(self.rows[info.modality], info) if self.uses(info)[0] else 0

    def losses_of(self, info: ItemInfo | ItemSize) -> int:
        """Return how many losses a generator has of an item, 0 if it isn't made."""
        return _count(self.losses[info.modality], info) if self.uses(info)[1] else 0

    def size_of(self, info: ItemInfo, placed: PlacedItem | None) -> ItemSize:
        """Return what an index says of an item.

        Args:
            info: of the item.
            placed: where it lies in its sample as cut; None: nowhere.
        """
        start, stop = (0, 0) if placed is None or placed.made_from is None else placed.made_from
        return ItemSize(
            modality=info.modality,
            number=info.index,
            size=tuple(info.size),
            rows=self.rows_of(info) if placed is None else placed.rows,
            kept=placed is not None,
            role=info.role,
            asked=self.made[info.modality].rows if self.uses(info)[1] else 0,
            made_from=stop - start,
            losses=self.losses_of(info),
        )


def index_path(origin: Origin, suffix: str = SIZES) -> Path:
    """Return the path of a file of an index."""
    return origin.index.with_name(origin.index.name + suffix)


def open_index(dataset: Dataset, rules: IndexRules, *, skips_broken: bool) -> JoinedIndex | None:
    """Return what indexes say of a dataset, None where it has none.

    Args:
        dataset: whose sources may have an index each.
        rules: which an index must have been made with.
        skips_broken: whether samples that are broken are left out; otherwise they are refused.

    Raises:
        DataError: an index is damaged, was made of other data or with other settings, or has broken samples.
    """
    sources = [source for _, source in sources_of(dataset)]
    parts = tuple(_open(source, rules, skips_broken=skips_broken) for source in sources)
    if all(part is None for part in parts):
        return None
    return JoinedIndex(counts=tuple(map(len, sources)), parts=parts)


def _open(dataset: Dataset, rules: IndexRules, *, skips_broken: bool) -> DatasetIndex | None:
    origin = origin_of(dataset)
    if origin is None:
        return None
    path = index_path(origin)
    try:
        stored = read_arrays(path)
        check_arrays(path)
        about = rules.about(origin)  # reads some MiB of the data
        sizes = sizes_of_arrays(stored)
        changed = _changed(stored.about, about, len(sizes) == len(dataset))
        changed = changed or _changed_items(sizes, rules, json.loads(stored.about[EXTREMES]))
        broken, first = json.loads(stored.about[BROKEN_SAMPLES])
    except FileNotFoundError:
        return None
    except (OSError, KeyError, ValueError) as error:
        raise _unreadable(path, error) from error
    if broken and not changed and stored.about.get(ENCODING) != rules.encoding:  # they may take what they refused
        changed = ["the encoders or generators" if rules.made else _CHANGED["encoders"]]
    _refuse_stale(path, changed)
    if broken and not skips_broken:
        raise DataError(
            origin.name,
            expected="samples that can be read",
            got=f"{broken} of {len(sizes)} that are broken, such as {', '.join(map(dataset.where, first))}",
            fix=f"{index_path(origin, BROKEN)} says what is wrong with each. Mend them and run "
            f'{_command(path)} again, or set data.broken = "skip".',
        )
    tokens = _open_tokens(index_path(origin, TOKENS), {**about, **rules.about_ids}, len(dataset))
    return DatasetIndex(sizes=sizes, tokens=tokens)


def _open_tokens(path: Path, about: Mapping[str, str], samples: int) -> TokenArrays | None:
    """Return the ids that are kept of a dataset; their checksums are looked at as they are read.

    Args:
        path: of the file.
        about: what the ids must have been made with.
        samples: of the dataset.
    """
    try:
        stored = read_arrays(path)
        tokens = tokens_of_file(stored)
    except FileNotFoundError:
        return None
    except (OSError, IndexFileError) as error:
        raise _unreadable(path, error) from error
    _refuse_stale(path, _changed(stored.about, about, len(tokens) == samples))
    return tokens


def _command(path: Path) -> str:
    """Return what makes a file of an index anew, with the ids where they are kept: without --tokens they would go."""
    return "`mimo data index FILE --tokens`" if path.with_suffix(TOKENS).exists() else "`mimo data index`"


def _again(path: Path) -> str:
    """Return what to do about an index."""
    return f"Run {_command(path)} with these settings (for held-out samples with --evaluation) again"


def _unreadable(path: Path, error: Exception) -> DataError:
    """Return the refusal of a file of an index that can't be read, or that is damaged."""
    if isinstance(error, OSError):
        return DataError(str(path), expected="an index that can be read", got=str(error))
    return DataError(str(path), expected="an index of samples", got=f"a damaged file: {error}", fix=f"{_again(path)}.")


def _refuse_stale(path: Path, changed: Sequence[str]) -> None:
    if changed:
        raise DataError(
            str(path),
            expected="an index of these data, made with these settings",
            got=f"one from before a change of {', '.join(changed)}",
            fix=f"{_again(path)}, or delete it.",
        )


def _changed(made: Mapping[str, str], now: Mapping[str, str], is_as_long: bool) -> list[str]:  # noqa: FBT001 - private
    changed = [name for name in _CHANGED if made.get(name) != now.get(name)]
    return [_CHANGED[name] for name in changed] or ([] if is_as_long else [_CHANGED["data"]])


def _changed_items(sizes: SampleSizes, rules: IndexRules, extremes: Sequence[int]) -> list[str]:
    """Return what has changed if encoders make other rows of some items than the index says, or generators losses."""
    count = len(sizes.modality)
    begins = np.linspace(0, max(count - _RUN, 0), _RUNS, dtype=np.int64)
    runs = {item for begin in begins.tolist() for item in range(begin, min(begin + _RUN, count))}
    for item in sorted(runs | set(extremes)):
        found = sizes.item(item)
        if rules.rows_of(found) != found.rows:
            return [_CHANGED["encoders"]]
        if rules.losses_of(found) != found.losses:
            return [_CHANGED["generators"]]
    return []


def _count(of_size: Callable[[tuple[int, ...]], int], item: ItemInfo | ItemSize) -> int:
    """Return a number of an item by its size; 0 of one that is refused, which lies beyond where its sample is cut."""
    try:
        return of_size(tuple(item.size))
    except ValueError:
        return 0


def _with_files(value: Any) -> Any:
    """Return plain settings with a digest of the file in place of each path of one."""
    if isinstance(value, Mapping):
        return {key: _with_files(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_files(each) for each in value]
    if not isinstance(value, str):
        return value
    try:
        with Path(value).open("rb") as file:
            return {"file": hashlib.file_digest(file, "sha256").hexdigest()}
    except (OSError, ValueError):  # no path
        return value
