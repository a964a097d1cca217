"""The kinds of image processing, and how each is known to be the library's."""

from __future__ import annotations

from collections.abc import Mapping

from mimo_transformers.images.anyres import OneVisionImages, TiledImages
from mimo_transformers.images.fitted import FittedImages
from mimo_transformers.images.fixed import FixedImages
from mimo_transformers.images.idefics import Idefics3Images
from mimo_transformers.images.internvl import InternVlImages, NamedTileImages
from mimo_transformers.images.native import NativeImages
from mimo_transformers.images.patches import LinePatchImages, PatchImages
from mimo_transformers.images.processing import ImageProcessing

KINDS: Mapping[str, type[ImageProcessing]] = {
    one.kind: one
    for one in (
        *(FixedImages, FittedImages, TiledImages, OneVisionImages, PatchImages, InternVlImages, NamedTileImages),
        *(Idefics3Images, NativeImages, LinePatchImages),
    )
}
"""The classes of settings, by kind."""

PARITY: Mapping[str, Mapping[str, str]] = {
    kind: {"pixels": "library", "text": "method", "rows": "library"} for kind in KINDS
}
"""Against what each kind is tested: ``library``, an image processor or a model of the library, or ``method``, a method
of its processor of texts that is called by itself, since that can't be built without a tokenizer or torchvision. For
PaliGemma's text, which no method writes alone, the formula stands beside LLaVA's and Gemma 3's of the same kind.
"""
