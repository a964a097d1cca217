"""The datasets that come with this package, and how they read pictures."""

from mimo.data.sources.images import image_size, load_image, open_image

__all__ = ["image_size", "load_image", "open_image"]
