"""Which kind a published folder's images are of, and its settings: the one place that names families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from mimo.model import MAX_PATCH, MAX_PIXELS, MAX_ROWS, MAX_TILES
from mimo_transformers.images.anyres import OneVisionImages, TiledImages
from mimo_transformers.images.defaults import OTHERS, PLAIN
from mimo_transformers.images.fixed import FixedImages
from mimo_transformers.images.idefics import Idefics3Images
from mimo_transformers.images.internvl import InternVlImages
from mimo_transformers.images.native import NativeImages
from mimo_transformers.images.patches import PatchImages
from mimo_transformers.images.pictures import MAX_CANVAS
from mimo_transformers.images.processing import ImageProcessing
from mimo_transformers.images.published import PublishedFolder, agreed
from mimo_transformers.images.readers import (
    class_rows,
    fixed_sizes,
    image_rows,
    patch,
    resizes,
    scaling,
    strategy,
    tile,
    tokens,
)

_SUFFIXES = ("Fast", "Pil")
_ASPECT_RATIO = "anyres_max_"

KINDS: Mapping[str, type[ImageProcessing]] = {
    one.kind: one
    for one in (FixedImages, TiledImages, OneVisionImages, PatchImages, InternVlImages, Idefics3Images, NativeImages)
}
"""The classes of settings, by kind."""

PARITY: Mapping[str, Mapping[str, str]] = {
    kind: {"pixels": "library", "text": "method", "rows": "library"} for kind in KINDS
}
"""Against what each kind is tested: ``library``, an image processor or a model of the library, or ``method``, a method
of its processor of texts that is called by itself, since that can't be built without a tokenizer or torchvision. For
PaliGemma's text, which no method writes alone, the formula stands beside LLaVA's and Gemma 3's of the same kind.
"""

_Reader: TypeAlias = Callable[[PublishedFolder], ImageProcessing]


def processing_of(
    described: Mapping[str, Any], preprocessor: Mapping[str, Any], processor: Mapping[str, Any]
) -> ImageProcessing:
    """Return how a published model of images and text prepares an image.

    Args:
        described: its ``config.json``.
        preprocessor: its ``preprocessor_config.json``; empty where the folder has none.
        processor: its ``processor_config.json``, likewise. A table ``image_processor`` in it, as transformers 5 writes
            one, takes the place of the file before, as it does in the library.

    Raises:
        ConfigError: by file and key, where the folder says what isn't known here, or its files disagree.
    """
    folder = PublishedFolder.of(described, preprocessor, processor)
    model_type, key = folder.config["model_type"].value, folder.preprocessor["image_processor_type"]
    usual, readers = _FAMILIES.get(model_type if isinstance(model_type, str) else "", ("", _FIXED))
    name = usual if key.value is None else key.text()
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    if name not in readers:
        raise key.refused(f"one of {', '.join(readers)} for a model of type {model_type!r}")
    defaults = {**PLAIN, **OTHERS}[name]
    folder = PublishedFolder(
        config=folder.config, processor=folder.processor, preprocessor=folder.preprocessor.with_defaults(defaults)
    )
    return readers[name](folder)


def _fixed(folder: PublishedFolder) -> ImageProcessing:
    sizes = fixed_sizes(folder)
    height, width, *_ = sizes["crop"] or sizes["resize"] * 2
    return FixedImages(**tokens(folder), **sizes, **scaling(folder), image_rows=image_rows(folder, (height, width)))


def _gemma(folder: PublishedFolder) -> ImageProcessing:
    if folder.preprocessor["do_pan_and_scan"].flag():
        raise folder.preprocessor["do_pan_and_scan"].refused("false, as further crops of an image aren't made here")
    rows = agreed(
        folder.processor["image_seq_length"],
        folder.preprocessor["image_seq_length"],
        folder.config["mm_tokens_per_image"],
    )
    return FixedImages(
        marker="<start_of_image>",
        placeholder="<image_soft_token>",
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        image_rows=256 if rows.value is None else rows.count(MAX_ROWS),
        **fixed_sizes(folder),
        **scaling(folder),
    )


def _tiled(folder: PublishedFolder) -> ImageProcessing:
    return TiledImages(
        tile=tile(folder),
        patch=patch(folder),
        class_rows=class_rows(folder),
        resolutions=_resolutions(folder),
        **tokens(folder),
        **scaling(folder),
    )


def _resolutions(folder: PublishedFolder) -> tuple[tuple[int, ...], ...]:
    return agreed(folder.preprocessor["image_grid_pinpoints"], folder.config["image_grid_pinpoints"]).pairs()


def _onevision(folder: PublishedFolder) -> ImageProcessing:
    strategy(folder).only("full", "as tiles are put together of all their rows")
    aspect = agreed(folder.processor["vision_aspect_ratio"], folder.config["vision_aspect_ratio"])
    ratio = aspect.text() if aspect.value is not None else f"{_ASPECT_RATIO}9"
    most = ratio.removeprefix(_ASPECT_RATIO)
    if most == ratio or not most.isdecimal() or not 1 <= len(most) <= len(str(MAX_TILES)):
        raise aspect.refused(f"{_ASPECT_RATIO} and a number of tiles")
    found = OneVisionImages(
        tile=tile(folder),
        patch=folder.config["vision_config.patch_size"].count(MAX_PATCH),
        max_tiles=int(most),
        resolutions=_resolutions(folder),
        **tokens(folder),
        **scaling(folder),
    )
    why = f"as tiles of {found.tile} pixels have in patches of {found.patch}"
    folder.processor["num_image_tokens"].only((found.tile // found.patch) ** 2, why)
    return found


def _patches(folder: PublishedFolder) -> ImageProcessing:
    resizes(folder)
    inside, tower = folder.preprocessor, "vision_config."
    bounds = [
        inside[short] if inside[short].value is not None else inside[f"size.{edge}"]
        for short, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    ]
    return PatchImages(
        marker="<|image_pad|>",
        placeholder="<|image_pad|>",
        patch=agreed(inside["patch_size"], folder.config[f"{tower}patch_size"]).count(MAX_PATCH),
        merge=agreed(inside["merge_size"], folder.config[f"{tower}spatial_merge_size"]).count(MAX_TILES),
        frames=agreed(inside["temporal_patch_size"], folder.config[f"{tower}temporal_patch_size"]).count(MAX_TILES),
        min_pixels=bounds[0].count(MAX_CANVAS),
        max_pixels=bounds[1].count(MAX_CANVAS),
        **scaling(folder),
    )


def _internvl(folder: PublishedFolder) -> ImageProcessing:
    rows = agreed(folder.processor["image_seq_length"], folder.config["image_seq_length"])
    return InternVlImages(
        marker="<IMG_CONTEXT>",
        placeholder="<IMG_CONTEXT>",
        before="<img>",
        after="</img>",
        tile=agreed(folder.preprocessor["size"], folder.config["vision_config.image_size"]).count(MAX_PIXELS),
        tile_rows=256 if rows.value is None else rows.count(MAX_ROWS),
        min_tiles=folder.preprocessor["min_patches"].count(MAX_TILES),
        max_tiles=folder.preprocessor["max_patches"].count(MAX_TILES),
        **scaling(folder),
    )


def _idefics(folder: PublishedFolder) -> ImageProcessing:
    resizes(folder)
    rows = folder.processor["image_seq_len"]
    side = agreed(folder.preprocessor["max_image_size.longest_edge"], folder.config["vision_config.image_size"])
    return Idefics3Images(
        marker="<image>",
        placeholder="<image>",
        tile=side.count(MAX_PIXELS),
        tile_rows=169 if rows.value is None else rows.count(MAX_ROWS),
        longest=folder.preprocessor["size.longest_edge"].count(MAX_PIXELS),
        split=folder.preprocessor["do_image_splitting"].flag(),
        **scaling(folder),
    )


def _native(folder: PublishedFolder) -> ImageProcessing:
    resizes(folder)
    strategy(folder).only("full", "as the tower has no row before those of patches")
    side = agreed(folder.processor["patch_size"], folder.config["vision_config.patch_size"])
    merge = agreed(folder.processor["spatial_merge_size"], folder.config["spatial_merge_size"])
    ends = {"line_end": "image_break_token", "image_end": "image_end_token"}
    said: dict[str, Any] = {ours: folder.processor[theirs] for ours, theirs in ends.items()}
    return NativeImages(
        **tokens(folder, "[IMG]"),
        **{ours: key.text() for ours, key in said.items() if key.value is not None},
        patch=(16 if side.value is None else side.count(MAX_PATCH))
        * (1 if merge.value is None else merge.count(MAX_TILES)),
        longest=folder.preprocessor["size.longest_edge"].count(MAX_PIXELS),
        **scaling(folder),
    )


_FIXED: Mapping[str, _Reader] = dict.fromkeys(PLAIN, _fixed)
_PATCHES: Mapping[str, _Reader] = {"Qwen2VLImageProcessor": _patches, "Qwen2_5_VLImageProcessor": _patches}
_IDEFICS: Mapping[str, _Reader] = {"Idefics3ImageProcessor": _idefics, "SmolVLMImageProcessor": _idefics}
_NATIVE: Mapping[str, _Reader] = {"PixtralImageProcessor": _native}

_FAMILIES: Mapping[str, tuple[str, Mapping[str, _Reader]]] = {
    "gemma3": ("Gemma3ImageProcessor", {"Gemma3ImageProcessor": _gemma}),
    "idefics3": ("Idefics3ImageProcessor", _IDEFICS),
    "internvl": ("GotOcr2ImageProcessor", {"GotOcr2ImageProcessor": _internvl}),
    "llava": ("CLIPImageProcessor", {**_FIXED, **_NATIVE}),
    "llava_next": ("LlavaNextImageProcessor", {"LlavaNextImageProcessor": _tiled}),
    "llava_onevision": ("LlavaOnevisionImageProcessor", {"LlavaOnevisionImageProcessor": _onevision}),
    "mistral3": ("PixtralImageProcessor", _NATIVE),
    "paligemma": ("SiglipImageProcessor", _FIXED),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", _PATCHES),
    "qwen2_vl": ("Qwen2VLImageProcessor", _PATCHES),
    "qwen3_vl": ("Qwen2VLImageProcessor", _PATCHES),
    "qwen3_vl_moe": ("Qwen2VLImageProcessor", _PATCHES),
    "smolvlm": ("SmolVLMImageProcessor", _IDEFICS),
    "vipllava": ("CLIPImageProcessor", _FIXED),
}
"""By the model's type: the image processor of folders that name none, and what reads those of each that may be named.

A model of another type may name any plain image processor.
"""
