"""The files of a published folder that say how images are prepared, read strictly: an error names file and key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import attrs

from mimo.hooks import ConfigError

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"
_INSIDE = "image_processor"
_MAX_LIST = 4096


@attrs.frozen
class FolderKey:
    """What a key of a file says.

    Args:
        file: its name.
        path: of the key, ``vision_config.patch_size`` one inside of another.
        value: None where it is null or not there.
    """

    file: str
    path: str
    value: Any

    def refused(self, expected: str, fix: str = "") -> ConfigError:
        """Return the error of a key that says something else than expected."""
        got = "nothing" if self.value is None else repr(self.value)
        return ConfigError(f"{self.file}: {self.path}", expected=expected, got=got, fix=fix)

    def count(self, most: int, *, least: int = 1) -> int:
        """Return a whole number; a list or table of twice the same one means that, as of a square."""
        value = _square(self.value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refused(f"a whole number from {least} to {most}")
        return value

    def number(self) -> float:
        """Return a finite number above 0."""
        if not _is_number(self.value) or self.value <= 0:
            raise self.refused("a finite number above 0")
        return float(self.value)

    def numbers(self) -> tuple[float, ...]:
        """Return a few numbers."""
        if not isinstance(self.value, list | tuple) or not all(map(_is_number, self.value)):
            raise self.refused("a list of numbers")
        return tuple(map(float, self.value[:_MAX_LIST]))

    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """Return a few pairs of whole numbers."""
        value = self.value
        if not isinstance(value, list | tuple) or not 0 < len(value) <= _MAX_LIST or not all(map(_is_pair, value)):
            raise self.refused("a list of pairs of whole numbers above 0")
        return tuple(tuple(pair) for pair in value)

    def text(self) -> str:
        """Return a text that isn't empty."""
        if not isinstance(self.value, str) or not self.value:
            raise self.refused("a text")
        return self.value

    def flag(self) -> bool:
        """Return true or false; null is false."""
        if self.value not in (None, True, False):
            raise self.refused("true or false")
        return bool(self.value)

    def only(self, allowed: object, why: str) -> None:
        """Refuse every other value; null is allowed."""
        if self.value is not None and self.value != allowed:
            raise self.refused(f"{allowed!r}, {why}")


@attrs.frozen
class FolderFile:
    """A file.

    Args:
        name: of it.
        table: what it says, with what keys mean that it leaves out.
    """

    name: str
    table: Mapping[str, Any]

    def __getitem__(self, path: str) -> FolderKey:
        """Return what a key says, in tables too: ``vision_config.patch_size``."""
        value: Any = self.table
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return FolderKey(self.name, path, value)

    def with_defaults(self, defaults: Mapping[str, Any]) -> FolderFile:
        """Return the file with what keys mean that are null or not there."""
        given = {key: value for key, value in self.table.items() if value is not None}
        return attrs.evolve(self, table={**defaults, **given})


@attrs.frozen(kw_only=True)
class PublishedFolder:
    """The three files of a folder; those that it lacks are empty.

    Args:
        config: of the model.
        preprocessor: of the image processor.
        processor: of texts and images together.
    """

    config: FolderFile
    preprocessor: FolderFile
    processor: FolderFile

    @classmethod
    def of(
        cls, described: Mapping[str, Any], preprocessor: Mapping[str, Any], processor: Mapping[str, Any]
    ) -> PublishedFolder:
        """Return the folder of three files as they are read; the table in the last one comes before the second file."""
        inside = processor.get(_INSIDE)
        image = FolderFile(PREPROCESSOR, preprocessor)
        if isinstance(inside, Mapping):
            image = FolderFile(f"{PROCESSOR}: {_INSIDE}", cast("Mapping[str, Any]", inside))
        return cls(config=FolderFile(CONFIG, described), preprocessor=image, processor=FolderFile(PROCESSOR, processor))


def agreed(*keys: FolderKey) -> FolderKey:
    """Return the first of some keys that says anything, or the first of all; the others must say the same.

    Raises:
        ConfigError: another key says something else, so that a text would have other rows than the model makes.
    """
    said = [key for key in keys if key.value is not None] or [keys[0]]
    for other in said[1:]:
        if _square(other.value) != _square(said[0].value):
            raise said[0].refused(f"{other.value!r}, as {other.file} says in {other.path}")
    return said[0]


def _square(value: Any) -> Any:
    """Return the number that a pair of equal ones means, and other values as they are, tuples as lists."""
    if isinstance(value, Mapping) and set(value) == {"height", "width"}:
        value = [value["height"], value["width"]]
    if isinstance(value, list | tuple):
        value = [list(one) if isinstance(one, tuple) else one for one in value]
        if _is_pair(value) and value[0] == value[1]:
            return value[0]
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_pair(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) == 2  # noqa: PLR2004 - height and width
    return is_list and all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in value)
