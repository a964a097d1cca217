"""What the files of a folder say of images of each kind: of each image processor, the settings that it means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from mimo.model import MAX_PATCH, MAX_PIXELS, MAX_ROWS, MAX_TILES
from mimo_transformers.image_files.published import FolderKey, PublishedFolder, agreed
from mimo_transformers.image_files.readers import (
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
from mimo_transformers.images import (
    MAX_CANVAS,
    FittedImages,
    FixedImages,
    Idefics3Images,
    ImageProcessing,
    InternVlImages,
    LinePatchImages,
    NamedTileImages,
    NativeImages,
    OneVisionImages,
    PatchImages,
    TiledImages,
)

Reader: TypeAlias = Callable[[PublishedFolder, str], ImageProcessing]
"""Of a folder, and of the token of a row where its processor's file says none, the settings that it means."""

_ASPECT_RATIO = "anyres_max_"


def read_fixed(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images of one size."""
    sizes = fixed_sizes(folder)
    height, width, *_ = sizes["crop"] or sizes["resize"] * 2
    return FixedImages(
        **tokens(folder, token), **sizes, **scaling(folder), image_rows=image_rows(folder, (height, width))
    )


def read_stretched(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images of one size that are not cut into tiles, as of GOT-OCR2."""
    folder.preprocessor["crop_to_patches"].only(False, "as further tiles of an image aren't made here")
    rows = folder.processor["num_image_tokens"]
    return FixedImages(
        **tokens(folder, token),
        image_rows=256 if rows.value is None else rows.count(MAX_ROWS),
        **fixed_sizes(folder),
        **scaling(folder),
    )


def read_gemma(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images of one size with text around them, as of Gemma 3."""
    if folder.preprocessor["do_pan_and_scan"].flag():
        raise folder.preprocessor["do_pan_and_scan"].refused("false, as further crops of an image aren't made here")
    rows = agreed(
        folder.processor["image_seq_length"],
        folder.preprocessor["image_seq_length"],
        folder.config["mm_tokens_per_image"],
    )
    return FixedImages(
        marker="<start_of_image>",
        placeholder=token,
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        image_rows=256 if rows.value is None else rows.count(MAX_ROWS),
        **fixed_sizes(folder),
        **scaling(folder),
    )


def read_tiled(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of tiles, as of LLaVA-NeXT."""
    return TiledImages(
        tile=tile(folder),
        patch=patch(folder),
        class_rows=class_rows(folder),
        resolutions=_resolutions(folder),
        **tokens(folder, token),
        **scaling(folder),
    )


def _resolutions(folder: PublishedFolder) -> tuple[tuple[int, ...], ...]:
    return agreed(folder.preprocessor["image_grid_pinpoints"], folder.config["image_grid_pinpoints"]).pairs()


def read_onevision(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of tiles, as of LLaVA-OneVision."""
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
        **tokens(folder, token),
        **scaling(folder),
    )
    why = f"as tiles of {found.tile} pixels have in patches of {found.patch}"
    folder.processor["num_image_tokens"].only((found.tile // found.patch) ** 2, why)
    return found


def read_patches(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images of nearly their own size, as of Qwen2-VL."""
    low, high = _bounds(folder, 1)
    return PatchImages(**_patches(folder, token), min_pixels=low, max_pixels=high)


def read_patches_of_frames(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images of which pixels of all frames are counted, as of GLM-4.1V."""
    folder.preprocessor["patch_expand_factor"].only(1, "as larger rows aren't made here")
    said = _patches(folder, token)
    low, high = _bounds(folder, said["frames"])
    return PatchImages(**said, min_pixels=low, max_pixels=high, enlarge="cut")


def read_line_patches(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images in patches line by line, as of PaddleOCR-VL."""
    low, high = _bounds(folder, 1)
    return LinePatchImages(**_patches(folder, token), min_pixels=low, max_pixels=high, enlarge="rounded")


def read_merged_patches(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images of which each says how its patches are merged, as of VideoLLaMA 3."""
    low, high = _bounds(folder, 1)
    return PatchImages(**_patches(folder, token), min_pixels=low, max_pixels=high, says_merge=True)


def _patches(folder: PublishedFolder, token: str) -> dict[str, Any]:
    resizes(folder)
    inside, tower = folder.preprocessor, "vision_config."
    return {
        **tokens(folder, token),
        "patch": agreed(inside["patch_size"], folder.config[f"{tower}patch_size"]).count(MAX_PATCH),
        "merge": agreed(inside["merge_size"], folder.config[f"{tower}spatial_merge_size"]).count(MAX_TILES),
        "frames": agreed(inside["temporal_patch_size"], folder.config[f"{tower}temporal_patch_size"]).count(MAX_TILES),
        **scaling(folder),
    }


def _bounds(folder: PublishedFolder, frames: int) -> tuple[int, ...]:
    """Return how many pixels a frame has at least and at most, of which so many frames have what a folder says."""
    inside = folder.preprocessor
    keys = [
        inside[short] if inside[short].value is not None else inside[f"size.{edge}"]
        for short, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    ]
    for key in keys:
        if key.count(MAX_CANVAS * frames, least=frames) % frames:
            raise key.refused(f"a whole number of pixels for each of {frames} frames")
    return tuple(key.count(MAX_CANVAS * frames) // frames for key in keys)


def read_internvl(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of tiles, as of InternVL."""
    rows = agreed(folder.processor["image_seq_length"], folder.config["image_seq_length"])
    return InternVlImages(
        marker=token,
        placeholder=token,
        before="<img>",
        after="</img>",
        tile_rows=256 if rows.value is None else rows.count(MAX_ROWS),
        **_tilings(folder),
        **scaling(folder),
    )


def _tilings(folder: PublishedFolder) -> dict[str, Any]:
    """Return the side of tiles, and how many there may be."""
    return {
        "tile": agreed(folder.preprocessor["size"], folder.config["vision_config.image_size"]).count(MAX_PIXELS),
        "min_tiles": folder.preprocessor["min_patches"].count(MAX_TILES),
        "max_tiles": folder.preprocessor["max_patches"].count(MAX_TILES),
    }


def read_named_tiles(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of tiles that are numbered, as of Aya Vision."""
    said = folder.processor
    words = {key: _text_or(said[key], usual) for key, usual in _AYA.items()}
    side, whole = (_count_or(said[key], usual) for key, usual in (("patch_size", 28), ("img_size", 364)))
    return NamedTileImages(
        marker=_text_or(said["image_token"], "<image>"),
        placeholder=_text_or(said["img_patch_token"], token),
        before=words["start_of_img_token"],
        after=words["end_of_img_token"],
        tile_name=words["tile_token"],
        whole_name=words["tile_global_token"],
        tile_rows=(whole // (side * _count_or(said["downsample_factor"], 1))) ** 2,
        **_tilings(folder),
        **scaling(folder),
    )


_AYA = {
    "start_of_img_token": "<|START_OF_IMG|>",
    "end_of_img_token": "<|END_OF_IMG|>",
    "tile_token": "TILE",
    "tile_global_token": "TILE_GLOBAL",
}
"""Texts that Aya Vision's processor has unless its file says others."""


def _text_or(key: FolderKey, usual: str) -> str:
    return usual if key.value is None else key.text()


def _count_or(key: FolderKey, usual: int) -> int:
    return usual if key.value is None else key.count(MAX_PIXELS)


def read_enclosed(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images that are fitted into a square, between tokens, as of Janus."""
    return attrs.evolve(read_fitted(folder, token), before="<begin_of_image>", after="<end_of_image>")


def read_fitted(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images that are fitted into a square, as of DeepSeek-VL."""
    resizes(folder)
    inside = folder.preprocessor
    inside["do_pad"].only(True, "as images must all have one size")
    side = agreed(inside["size"], folder.config["vision_config.image_size"]).count(MAX_PIXELS)
    rows = folder.processor["num_image_tokens"]
    return FittedImages(
        **tokens(folder, token),
        side=side,
        least=inside["min_size"].count(side),
        image_rows=576 if rows.value is None else rows.count(MAX_ROWS),
        **scaling(folder),
    )


def read_idefics(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of tiles that are named, as of Idefics 3."""
    resizes(folder)
    rows = folder.processor["image_seq_len"]
    side = agreed(folder.preprocessor["max_image_size.longest_edge"], folder.config["vision_config.image_size"])
    return Idefics3Images(
        marker=token,
        placeholder=token,
        tile=side.count(MAX_PIXELS),
        tile_rows=169 if rows.value is None else rows.count(MAX_ROWS),
        longest=folder.preprocessor["size.longest_edge"].count(MAX_PIXELS),
        split=folder.preprocessor["do_image_splitting"].flag(),
        **scaling(folder),
    )


def read_native(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images of their own size, as of Pixtral."""
    resizes(folder)
    strategy(folder).only("full", "as the tower has no row before those of patches")
    return NativeImages(**_native(folder, token), **_line_ends(folder))


def read_unbroken(folder: PublishedFolder, token: str) -> ImageProcessing:
    """Return settings of images of their own size without tokens between rows, as of LightOnOCR."""
    resizes(folder)
    return NativeImages(**_native(folder, token), line_end="", image_end="")


def _native(folder: PublishedFolder, token: str) -> dict[str, Any]:
    side = agreed(folder.processor["patch_size"], folder.config["vision_config.patch_size"])
    merge = agreed(folder.processor["spatial_merge_size"], folder.config["spatial_merge_size"])
    return {
        **tokens(folder, token),
        "patch": (16 if side.value is None else side.count(MAX_PATCH))
        * (1 if merge.value is None else merge.count(MAX_TILES)),
        "longest": folder.preprocessor["size.longest_edge"].count(MAX_PIXELS),
        **scaling(folder),
    }


def _line_ends(folder: PublishedFolder) -> dict[str, Any]:
    ends = {"line_end": "image_break_token", "image_end": "image_end_token"}
    said = {ours: folder.processor[theirs] for ours, theirs in ends.items()}
    return {ours: key.text() for ours, key in said.items() if key.value is not None}
