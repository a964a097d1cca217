"""How published models of images and text prepare images, without the library's image processors."""

from mimo_transformers.images.families import KINDS, PARITY, processing_of
from mimo_transformers.images.processing import ImageProcessing

__all__ = ["KINDS", "PARITY", "ImageProcessing", "processing_of"]
