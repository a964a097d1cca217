"""The datasets that come with this package, how they read pictures, and where their settings are."""

from mimo.data.sources.images import image_size, load_image, open_image
from mimo.data.sources.settings_path import settings_under

__all__ = ["image_size", "load_image", "open_image", "settings_under"]
