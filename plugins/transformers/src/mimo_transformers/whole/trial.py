"""What the half of a whole model that makes rows of images can do here, found out on a thin one: all its layers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError, JsonNode
from mimo.model import MAX_LAYERS
from mimo.model.runtime import Split, TensorAxis
from mimo_transformers.family import half_of, new_image_text
from mimo_transformers.model.small import affordable, constants_of, stir, thin_values
from mimo_transformers.trial.encoders import (
    Tried,
    UnfitError,
    check_rows,
    encoder_splits,
    idle_in,
    read_constants,
    read_paths,
    try_encoder,
    write_tried,
)
from mimo_transformers.trial.record import Form, recall
from mimo_transformers.trial.tensor_plan import TensorPlan, plans
from mimo_transformers.trial.two_ranks import PLAN, find_plan, right_plan, try_plan
from mimo_transformers.whole.config import HfImagesConfig
from mimo_transformers.whole.encoder import SIZE, HfImages, image_rows, prepared
from mimo_transformers.whole.miscount import Miscount
from mimo_transformers.whole.packed_images import makes_one_call

_SIZES = ((56, 84), (140, 60), (84, 84))
_KEPT = ("image_size", "window_size", "vocab_size")
"""Of a tower, what stays as it is; its vocabulary, as no setting says it."""
_IDS = ("_token_id", "_token_index")
_THIN_TOWER: Mapping[str, int] = {"embed_dim": 32, "num_heads": 4}
"""Of a tower, what `thin_values` has no name for."""


@attrs.frozen(kw_only=True)
class TriedImages(Tried):
    """What a trial has found.

    Args:
        miscount: the first image whose number of rows the settings say wrongly, None if there is none.
        parts: how many rows of the language model's width lie side by side in each.
        one_call: whether attention over all images can be one call.
    """

    miscount: Miscount | None = None
    parts: int = 1
    one_call: bool = False

    def encoder(self, config: HfImagesConfig) -> HfImages:
        """Return the encoder of a config that was tried."""
        return HfImages(config, idle=self.idle, constant=self.constants.get, one_call=self.one_call)


def _write(tried: TriedImages) -> dict[str, object] | None:
    plain = write_tried(tried)
    if plain is None or tried.miscount is not None:
        return None
    return {**plain, "parts": tried.parts, "one_call": tried.one_call}


def _read(node: JsonNode) -> TriedImages:
    said = node.fields(("idle", "constants", "parts", "one_call"))
    parts, one_call = said["parts"].integer(), said["one_call"].value
    if not 1 <= parts <= MAX_LAYERS:
        raise said["parts"].fail(f"1 to {MAX_LAYERS}")
    if type(one_call) is not bool:
        raise said["one_call"].fail("true or false")
    idle, constants = read_paths(said["idle"]), read_constants(said["constants"])
    return TriedImages(idle=idle, constants=constants, parts=parts, one_call=one_call)


_FORM = Form(write=_write, read=_read)


def build_images(config: HfImagesConfig, hidden: int) -> HfImages:
    """Return the encoder of a config.

    Raises:
        ConfigError: the language model's rows have another width; or a thin encoder doesn't compute of each image in a
            batch what the library computes of it alone, makes another number of rows than its ``images`` say, draws
            random numbers or changes what isn't trained.
    """
    tried = tried_of(config)
    if tried.miscount is not None:
        raise tried.miscount.error(config)
    if tried.problem:
        raise refusal(config, tried.problem)
    if hidden != config.hidden * tried.parts:
        raise ConfigError(
            "config.values.text_config.hidden_size",
            expected=f"a language model that takes rows of {config.hidden * tried.parts}",
            got=f"one that takes rows of {hidden}",
        )
    return tried.encoder(config)


def width_of(config: HfImagesConfig) -> int:
    """Return the width of the rows that the encoder of a config delivers."""
    return config.hidden * tried_of(config).parts


def tried_of(config: HfImagesConfig) -> TriedImages:
    """Return what was found of a thin encoder of a config.

    Raises:
        ConfigError: a setting is wrong by itself.
    """
    config.library(), config.processing  # before anything is tried
    return _tried(_described(config))


def tensor_splits(encoder: HfImages, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to an encoder, and return how its parameters lie by `plan_of` its tower."""
    return {} if axis.size == 1 else encoder_splits(encoder, axis, plan_of(encoder.config))


def plan_of(config: HfImagesConfig) -> TensorPlan:
    """Return the plan that was found right for a tower.

    Raises:
        ConfigError: there is none.
    """
    return right_plan(_plan(_described(config)), config.model_type)


def _described(config: HfImagesConfig) -> str:
    """Return the thin encoder of a config as text."""
    thin = thin_images(config)
    return json.dumps({key: getattr(thin, key) for key in ("model_type", "values", "images")}, sort_keys=True)


@cache
def _tried(description: str) -> TriedImages:
    config = HfImagesConfig(**json.loads(description))
    return recall("images", description, lambda: try_encoder(lambda: _try(config), TriedImages), _FORM)


@cache
def _plan(description: str) -> TensorPlan | str:
    config = HfImagesConfig(**json.loads(description))
    find = partial(_find_plan, config, _tried(description))
    return recall("images plan", description, lambda: try_plan(find), PLAN)


def thin_images(config: HfImagesConfig, *, has_all_text: bool = False) -> HfImagesConfig:
    """Return the config of a whole model with all layers of the tower of another, of small widths.

    Images, patches and how they are joined stay as they are, since the number of rows follows from them.

    Args:
        config: of the other one.
        has_all_text: whether the language model has all layers too, instead of one.
    """
    values = thin_whole(config.library(), thin_text(config.library(), has_all=has_all_text))
    # Ids don't matter to what is tried, so that one trial serves models that differ in them.
    values = {key: one for key, one in values.items() if not key.endswith(_IDS)}
    return HfImagesConfig(model_type=config.model_type, values=values, images=config.images)


def thin_text(library: Any, *, has_all: bool = False) -> dict[str, Any]:
    """Return the keys of the language model of a thin whole model, with one layer or all of them.

    Args:
        library: config of the whole.
        has_all: whether it has all layers.
    """
    found = thin_values(library.text_config)
    if has_all:
        return found
    kinds = {key: one[:1] for key, one in found.items() if key.endswith("layer_types") and one}
    return {**found, "num_hidden_layers": 1, **kinds}


def thin_whole(library: Any, text_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config of a whole model with all layers of the tower of another, of small widths.

    Args:
        library: config of the other.
        text_keys: of the language model.
    """
    tower, text = library.vision_config, library.text_config
    thin_tower = {**thin_values(tower), **{key: size for key, size in _THIN_TOWER.items() if hasattr(tower, key)}}
    thin_tower |= {key: getattr(tower, key) for key in _KEPT if hasattr(tower, key)}
    sections = {"vision_config": (tower, thin_tower), "text_config": (text, text_keys)}
    others = {key: one for key, one in library.to_dict().items() if key not in sections}
    values = json.loads(json.dumps(others, default=str))
    # What is as wide as the language model stays so.
    for keys in (thin_tower, values):
        keys |= {
            key: text_keys["hidden_size"]
            for key, one in keys.items()
            if type(one) is int and one == text.hidden_size and key.endswith(("_size", "_dim"))
        }
    for name, (section, thin) in sections.items():
        values[name] = {**thin, "model_type": section.model_type}
    del values["model_type"]
    return _known(values)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    left = ("architectures", "transformers_version", "dtype", "torch_dtype")
    return {key: value for key, value in values.items() if key not in left}


def refusal(config: HfImagesConfig, got: str) -> ConfigError:
    """Return the error of a model that can't be an encoder."""
    return ConfigError(
        "config.model_type",
        expected="an image-text model of transformers of which each image makes rows by itself",
        got=f"{config.model_type!r} with {got}",
        fix="plugins/transformers/README.md lists those that can be trained.",
    )


def draw_images(sizes: Iterable[tuple[int, int]] = _SIZES) -> list[Any]:
    """Return images of noise of some heights and widths."""
    from PIL import Image

    found = []
    for height, width in sizes:
        pixels = torch.randint(0, 256, (height, width, 3))
        found.append(Image.frombytes("RGB", (width, height), bytes(pixels.flatten().tolist())))
    return found


def _try(config: HfImagesConfig) -> TriedImages:
    library = config.library()
    whole = affordable(partial(new_image_text, library))
    constants = constants_of(whole)
    whole = stir(whole)
    encoder = HfImages(config, constant=constants.get)
    encoder.read(whole)
    alone = half_of(whole.eval())
    images, processing = draw_images(), config.processing
    items = [prepared(config, image) for image in images]
    wanted = []
    for image, item in zip(images, items, strict=True):
        size = (image.height, image.width)
        given = processing.collate([{key: one for key, one in item.items() if key != SIZE}], [size])
        wanted.append(image_rows(alone.base, given))
        if len(wanted[-1]) != processing.rows(size):
            return TriedImages(miscount=Miscount(size=size, made=len(wanted[-1]), said=processing.rows(size)))
    rows = torch.cat(wanted)
    if rows.shape[1] % config.hidden:
        raise UnfitError("rows of another width than text_config.hidden_size")
    _check(encoder, items, rows)
    there = encoder.published(whole)
    idle = frozenset(there[name].name for name in idle_in(encoder, lambda: encoder(items)))
    one_call = _is_one_call(HfImages(config, constant=constants.get, one_call=True), whole, items, rows)
    return TriedImages(idle=idle, constants=constants, parts=rows.shape[1] // config.hidden, one_call=one_call)


def _check(encoder: HfImages, items: Sequence[Mapping[str, Tensor]], rows: Tensor) -> None:
    """Refuse an encoder that doesn't make these rows of images in a batch, or does more than that.

    Raises:
        UnfitError: saying what it does.
    """
    check_rows(encoder, lambda: encoder(items), rows)
    if encoder([]).shape != rows[:0].shape:
        raise UnfitError("no rows without an image")


def _is_one_call(encoder: HfImages, whole: Any, items: Sequence[Mapping[str, Tensor]], rows: Tensor) -> bool:
    """Tell whether a tower hands all images to one call of attention, and makes the same rows so."""
    try:
        encoder.read(whole)
        _check(encoder, items, rows)
    except Exception:  # noqa: BLE001 - whatever a model of the library does with attention of another form
        return False
    return makes_one_call(encoder.encoder)


def _find_plan(config: HfImagesConfig, tried: TriedImages) -> TensorPlan | str:
    library = config.library()
    whole = stir(affordable(partial(new_image_text, library)))
    items = [prepared(config, image) for image in draw_images()]
    weights: list[Tensor] = []

    def make() -> nn.Module:
        encoder = tried.encoder(config)
        encoder.read(whole)
        return encoder

    def run(encoder: nn.Module) -> Tensor:
        rows = encoder(items)
        if not weights:
            weights.append(torch.randn_like(rows))
        loss: Tensor = (rows * weights[0]).square().sum()  # in which nothing cancels
        return loss

    return find_plan(make, run, encoder_splits, plans(library.vision_config, None))
