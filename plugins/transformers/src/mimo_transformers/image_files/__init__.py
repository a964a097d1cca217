"""What the files of a published folder say of how images are prepared."""

from mimo_transformers.image_files.families import processing_of

__all__ = ["processing_of"]
