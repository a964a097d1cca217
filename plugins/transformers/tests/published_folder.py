"""What a small published folder of a model of images and text consists of, and how its config is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from small_models import known

from mimo_transformers import shrink
from mimo_transformers.family import config_of
from mimo_transformers.image_files import processing_of
from mimo_transformers.images import ImageProcessing

PATCH = 4
TILE = 4 * PATCH
"""Pixels of a side of what small models see, as `shrink` has it."""
SQUARE = {"height": TILE, "width": TILE}
COVERED = {"size": {"shortest_edge": TILE}, "crop_size": SQUARE}
LARGEST = 4 * TILE
"""Pixels of the longest side of an image that keeps its shape."""
JOINED = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
BOUNDS = {**JOINED, "min_pixels": TILE**2, "max_pixels": LARGEST**2}


@attrs.frozen(kw_only=True)
class Folder:
    """What files of a small published folder say.

    Args:
        config: of the model.
        preprocessor: of the image processor.
        processor: of both.
    """

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any] = attrs.field(factory=dict)

    def processing(self) -> ImageProcessing:
        """Return what is made of it."""
        return processing_of(self.config, self.preprocessor, self.processor)


@attrs.frozen(kw_only=True)
class Family:
    """What of a small folder doesn't follow from the library's config of a model type, which `shrink` makes small.

    Args:
        model_type: of the whole model.
        preprocessor: what its file says.
        processor: what its file says.
        said: keys of the config that are no sizes and aren't the library's own, or that other files are compared with.
    """

    model_type: str
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any] = attrs.field(factory=dict)
    said: Mapping[str, Any] = attrs.field(factory=dict)

    def folder(self) -> Folder:
        """Return the folder; a test of one that the installed library lacks is skipped."""
        library = config_of(known(self.model_type), self.said)
        config = {"model_type": self.model_type, **self.said, **shrink(library)}
        return Folder(config=config, preprocessor=self.preprocessor, processor=self.processor)


class Folders(Mapping[str, Folder]):
    """Small folders by name, each made where it is first looked up.

    Args:
        families: by name.
    """

    def __init__(self, families: Mapping[str, Family]) -> None:
        self.families = families
        self._made: dict[str, Folder] = {}

    def __getitem__(self, name: str) -> Folder:
        """Return one."""
        if name not in self._made:
            self._made[name] = self.families[name].folder()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        """Say whether there is one, without making it."""
        return name in self.families

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.families)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.families)
