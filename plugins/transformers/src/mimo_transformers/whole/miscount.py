"""What settings of images say of numbers of rows, where a model makes others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from mimo.hooks import ConfigError

if TYPE_CHECKING:
    from mimo_transformers.whole.config import HfImagesConfig


@attrs.frozen(kw_only=True)
class Miscount:
    """An image of which the library makes another number of rows than the settings of images say.

    Args:
        size: its height and width in pixels.
        made: rows that the library makes of it.
        said: rows that the settings say.
    """

    size: tuple[int, int]
    made: int
    said: int

    def error(self, config: HfImagesConfig) -> ConfigError:
        """Return the error that names the setting."""
        height, width = self.size
        return ConfigError(
            ".".join(filter(None, ("config.images", config.processing.rows_key))),
            expected=f"{self.made} rows of an image of {height} x {width}, as {config.model_type!r} makes",
            got=f"{self.said}",
            fix="`mimo checkpoint import-hf DIR` prints the settings that a published folder means.",
        )
