"""The index of a dataset's sizes as a job needs it: what it must have been made with, and whether it was.

Rows are not compared by an encoder's settings, most of which change none, but as they are: the encoder says again how
many rows some of the index's items become, those with the fewest and the most among them.
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
    IndexFileError,
    JoinedSizes,
    Origin,
    SampleSizes,
    check_arrays,
    digest_of_text,
    origin_of,
    read_arrays,
    sizes_of_arrays,
    sources_of,
)
from mimo.hooks import DataError
from mimo.model import EncoderSpec
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.config.structure import unstructure
from mimo.trainer.job.job import JobModule

SIZES, BROKEN = ".sizes", ".broken"
"""Suffixes of the files of an index: its arrays, and lines of JSON on what is broken."""
COMMAND = "Run `mimo data index` with these settings (for held-out samples with --evaluation)"
EXTREMES = "extremes"
"""Text in the file: numbers of the items with the fewest and the most rows."""
BROKEN_SAMPLES = "broken_samples"
"""Text in the file: number of broken samples, and those of the first of them."""
ENCODING = "encoding"
"""Text in the file: digest of all settings of encoders."""
_CHANGED: Mapping[str, str] = {
    "data": "the data",
    "tokenizer": "the tokenizer",
    "template": "the template of conversations or settings by which samples are read",
    "encoders": "the encoders",
    "max_tokens": "data.max_tokens",
}
_RUNS, _RUN = 16, 32
"""Items that are compared: so many in a row, at so many places."""


@attrs.frozen(kw_only=True)
class IndexRules:
    """What of a job's settings decides the sizes of samples.

    Args:
        tokenizer: digest of its plugin, settings and files.
        encoders: plugin of each modality.
        encoding: digest of all their settings.
        rows: of each modality, the rows of an item by its size.
        max_tokens: rows of a sample at most.
        end: id of the tokenizer's end.
    """

    tokenizer: str
    encoders: Mapping[str, str]
    encoding: str
    rows: Mapping[str, Callable[[tuple[int, ...]], int]]
    max_tokens: int
    end: int

    @classmethod
    def of(cls, modules: Sequence[JobModule], *, tokenizer: Mapping[str, Any], max_tokens: int, end: int) -> IndexRules:
        """Return the rules of settings; ``tokenizer`` is all of its table, as plain data."""
        encoders = {
            each.modality: each for each in modules if isinstance(each.spec, EncoderSpec) and each.feeds == LANGUAGE
        }
        return cls(
            tokenizer=digest_of_text(_with_files(tokenizer)),
            encoders={modality: encoder.spec.name for modality, encoder in encoders.items()},
            encoding=digest_of_text({modality: unstructure(each.config) for modality, each in encoders.items()}),
            rows={
                modality: partial(encoder.spec.rows, encoder.config)
                for modality, encoder in encoders.items()
                if isinstance(encoder.spec, EncoderSpec)
            },
            max_tokens=max_tokens,
            end=end,
        )

    def about(self, origin: Origin) -> dict[str, str]:
        """Return what an index of data is made with, by name."""
        return {
            "data": origin.digest(),
            "tokenizer": self.tokenizer,
            "template": origin.template(),
            "encoders": digest_of_text(sorted(self.encoders.items())),
            "max_tokens": str(self.max_tokens),
        }


def index_path(origin: Origin, suffix: str = SIZES) -> Path:
    """Return the path of a file of an index."""
    return origin.index.with_name(origin.index.name + suffix)


def open_index(dataset: Dataset, rules: IndexRules, *, skips_broken: bool) -> JoinedSizes | None:
    """Return the sizes that are known of a dataset, None where none are.

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
    return JoinedSizes(counts=tuple(map(len, sources)), parts=parts)


def _open(dataset: Dataset, rules: IndexRules, *, skips_broken: bool) -> SampleSizes | None:
    origin = origin_of(dataset)
    if origin is None:
        return None
    path = index_path(origin)
    try:
        stored = read_arrays(path)
        check_arrays(path)
        sizes = sizes_of_arrays(stored)
        changed = _changed(stored.about, rules.about(origin), len(sizes) == len(dataset))
        if not changed and not _has_rows(sizes, rules, json.loads(stored.about[EXTREMES])):
            changed = [_CHANGED["encoders"]]
        broken, first = json.loads(stored.about[BROKEN_SAMPLES])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(str(path), expected="an index that can be read", got=str(error)) from error
    except (IndexFileError, KeyError, ValueError) as error:
        raise DataError(
            str(path), expected="an index of samples", got=f"a damaged file: {error}", fix=f"{COMMAND} again."
        ) from error
    if broken and not changed and stored.about.get(ENCODING) != rules.encoding:
        changed = [_CHANGED["encoders"]]  # which may read what they refused before
    if changed:
        raise DataError(
            str(path),
            expected="an index of these data, made with these settings",
            got=f"one from before a change of {', '.join(changed)}",
            fix=f"{COMMAND} again, or delete it.",
        )
    if broken and not skips_broken:
        raise DataError(
            origin.name,
            expected="samples that can be read",
            got=f"{broken} of {len(sizes)} that are broken, such as {', '.join(map(dataset.where, first))}",
            fix=f"{index_path(origin, BROKEN)} says what is wrong with each. Mend them and run `mimo data index` "
            'again, or set data.broken = "skip".',
        )
    return sizes


def _changed(made: Mapping[str, str], now: Mapping[str, str], is_as_long: bool) -> list[str]:  # noqa: FBT001 - private
    changed = [name for name in now if made.get(name) != now[name]]
    return [_CHANGED[name] for name in changed] or ([] if is_as_long else [_CHANGED["data"]])


def _has_rows(sizes: SampleSizes, rules: IndexRules, extremes: Sequence[int]) -> bool:
    """Return whether encoders make as many rows of some items as the index says."""
    count = len(sizes.modality)
    begins = np.linspace(0, max(count - _RUN, 0), _RUNS, dtype=np.int64)
    runs = {item for begin in begins.tolist() for item in range(begin, min(begin + _RUN, count))}
    for item in sorted(runs | set(extremes)):
        found = sizes.item(item)
        if rows_of(rules, found.modality, found.size) != found.rows:
            return False
    return True


def rows_of(rules: IndexRules, modality: str, size: tuple[int, ...]) -> int:
    """Return the rows of an item; 0 of one that its encoder refuses, which lies beyond where its sample is cut."""
    try:
        return rules.rows[modality](size)
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
