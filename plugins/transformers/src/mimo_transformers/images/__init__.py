"""How published models of images and text prepare images, without the library's image processors."""

from mimo_transformers.images.anyres import OneVisionImages, TiledImages
from mimo_transformers.images.fitted import FittedImages
from mimo_transformers.images.fixed import FixedImages
from mimo_transformers.images.idefics import Idefics3Images
from mimo_transformers.images.internvl import InternVlImages, NamedTileImages
from mimo_transformers.images.kinds import KINDS, PARITY
from mimo_transformers.images.native import NativeImages
from mimo_transformers.images.patches import LinePatchImages, PatchImages
from mimo_transformers.images.pictures import COLOURS, MAX_CANVAS, RESAMPLES
from mimo_transformers.images.processing import ImageProcessing

__all__ = [
    "COLOURS",
    "KINDS",
    "MAX_CANVAS",
    "PARITY",
    "RESAMPLES",
    "FittedImages",
    "FixedImages",
    "Idefics3Images",
    "ImageProcessing",
    "InternVlImages",
    "LinePatchImages",
    "NamedTileImages",
    "NativeImages",
    "OneVisionImages",
    "PatchImages",
    "TiledImages",
]
