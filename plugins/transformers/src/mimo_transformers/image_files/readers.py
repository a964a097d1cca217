"""What the files of several families have in common: tokens, how pixels are scaled, sizes, and rows of a tower."""

from __future__ import annotations

from typing import Any

from mimo.model import MAX_PATCH, MAX_PIXELS, MAX_ROWS
from mimo_transformers.image_files.published import FolderKey, PublishedFolder, agreed
from mimo_transformers.images import COLOURS, RESAMPLES

_FILTERS = tuple(sorted(RESAMPLES, key=RESAMPLES.__getitem__))
_CLASS_ROWS = {"clip_vision_model": 1, "siglip_vision_model": 0}
_STRATEGY = "vision_feature_select_strategy"


def tokens(folder: PublishedFolder, usual: str) -> dict[str, Any]:
    """Return marker and placeholder where both are the image token of the processor."""
    key = folder.processor["image_token"]
    token = usual if key.value is None else key.text()
    return {"marker": token, "placeholder": token}


def scaling(folder: PublishedFolder) -> dict[str, Any]:
    """Return how pictures are resized and their bytes scaled."""
    inside = folder.preprocessor
    found: dict[str, Any] = {
        "resample": _FILTERS[inside["resample"].count(len(_FILTERS) - 1, least=0)],
        "rescale": inside["rescale_factor"].number() if inside["do_rescale"].flag() else 1.0,
        "mean": (0.0,) * COLOURS,
        "std": (1.0,) * COLOURS,
    }
    if inside["do_normalize"].flag():
        for ours, theirs in (("mean", "image_mean"), ("std", "image_std")):
            found[ours] = inside[theirs].numbers()
            least = min(found[ours], default=0)
            if len(found[ours]) != COLOURS or (ours == "std" and least <= 0):
                raise inside[theirs].refused(f"{COLOURS} numbers{' above 0' if ours == 'std' else ''}")
    return found


def resizes(folder: PublishedFolder) -> None:
    """Refuse images that keep sizes of any kind.

    Raises:
        ConfigError: ``do_resize`` is false.
    """
    if not folder.preprocessor["do_resize"].flag():
        raise folder.preprocessor["do_resize"].refused("true, as images have any size")


def fixed_sizes(folder: PublishedFolder) -> dict[str, Any]:
    """Return how every image gets one size."""
    resizes(folder)
    inside = folder.preprocessor
    pad = inside["do_pad"].flag()
    if pad and inside["image_processor_type"].value not in (None, *_PADDING):
        raise inside["do_pad"].refused("false, as this image processor pads no image to a square")
    if pad and not inside["do_normalize"].flag():
        raise inside["do_pad"].refused("false, as there is no mean colour without do_normalize")
    crop = _sides(inside["crop_size"]) if inside["do_center_crop"].flag() else ()
    size = inside["size"]
    if isinstance(size.value, int) and not inside["default_to_square"].flag():
        resize: tuple[int, ...] = (size.count(MAX_PIXELS),)
    elif isinstance(size.value, dict) and set(size.value) == {"shortest_edge"}:
        resize = (inside["size.shortest_edge"].count(MAX_PIXELS),)
    else:
        resize = _sides(size)
    if len(resize) == 1 and not crop and not pad:
        raise inside["do_center_crop"].refused("true, or height and width in size, as images must all have one size")
    return {"resize": resize, "crop": crop, "pad": pad}


_PADDING = tuple(f"LlavaImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))


def _sides(key: FolderKey) -> tuple[int, int]:
    if isinstance(key.value, dict) and set(key.value) == {"height", "width"}:
        file, path = key.file, key.path
        height, width = (FolderKey(file, f"{path}.{one}", key.value[one]) for one in ("height", "width"))
        return height.count(MAX_PIXELS), width.count(MAX_PIXELS)
    if isinstance(key.value, int):
        return (key.count(MAX_PIXELS),) * 2
    raise key.refused("height and width")


def tile(folder: PublishedFolder) -> int:
    """Return the side of a tile, which is what the image processor resizes and cuts to, and the tower sees.

    Raises:
        ConfigError: they differ.
    """
    inside = folder.preprocessor
    short = inside["size.shortest_edge"]
    size = inside["size"] if short.value is None else short
    return agreed(size, inside["crop_size"], folder.config["vision_config.image_size"]).count(MAX_PIXELS)


def patch(folder: PublishedFolder) -> int:
    """Return the side of a patch, of which each becomes a row.

    Raises:
        ConfigError: neither file says it, or both and differently.
    """
    return agreed(folder.processor["patch_size"], folder.config["vision_config.patch_size"]).count(MAX_PATCH)


def strategy(folder: PublishedFolder) -> FolderKey:
    """Return what says whether the first row of the tower is left out.

    Raises:
        ConfigError: files disagree.
    """
    return agreed(folder.config[_STRATEGY], folder.processor[_STRATEGY])


def class_rows(folder: PublishedFolder) -> int:
    """Return the rows that are handed on of those before patches.

    Raises:
        ConfigError: neither the processor nor the type of the tower says how many there are, or the first one is to be
            left out where there is none.
    """
    key, tower = folder.processor["num_additional_image_tokens"], folder.config["vision_config.model_type"]
    if key.value is None and tower.value not in _CLASS_ROWS:
        raise key.refused(f"how many rows a tower of type {tower.value!r} has before those of patches")
    found = _CLASS_ROWS[tower.value] if key.value is None else key.count(MAX_ROWS, least=0)
    left_out = strategy(folder)
    if left_out.value not in (None, "default", "full"):
        raise left_out.refused("'default' or 'full'")
    if left_out.value == "full":
        return found
    if not found:
        raise left_out.refused("'full', as the tower has no row before those of patches")
    return found - 1


def image_rows(folder: PublishedFolder, size: tuple[int, int]) -> int:
    """Return the rows of each image of one size: the number that a file says, or those of its patches."""
    said = agreed(
        folder.processor["image_seq_length"],
        folder.preprocessor["image_seq_length"],
        folder.config["text_config.num_image_tokens"],
    )
    if said.value is not None:
        return said.count(MAX_ROWS)
    side = patch(folder)
    return (size[0] // side) * (size[1] // side) + class_rows(folder)
