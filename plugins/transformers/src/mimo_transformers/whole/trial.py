"""What the half of a whole model that makes rows of images can do here, found out on a thin one: all its layers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError, UserError
from mimo.model.runtime import Split, TensorAxis
from mimo_transformers.family import half_of, new_image_text
from mimo_transformers.model.small import affordable, constants_of, stir, thin_values, trying
from mimo_transformers.trial.tensor_plan import Heads, TensorPlan, plans, split_linears
from mimo_transformers.trial.two_ranks import find_plan, right_plan
from mimo_transformers.whole.config import HfImagesConfig
from mimo_transformers.whole.encoder import SIZE, HfImages, fixed_tensors, image_rows, prepared
from mimo_transformers.whole.packed_images import makes_one_call

_TOLERANCE = 1e-5
_SIZES = ((56, 84), (140, 60), (84, 84))
_KEPT = ("image_size", "window_size", "vocab_size")
"""Of a tower, what stays as it is; its vocabulary, as no setting says it."""
_IDS = ("_token_id", "_token_index")
_THIN_TOWER: Mapping[str, int] = {"embed_dim": 32, "num_heads": 4}
"""Of a tower, what `thin_values` has no name for."""


@attrs.frozen(kw_only=True)
class TriedImages:
    """What a trial has found.

    Args:
        problem: why it can't be trained, empty if it can.
        idle: paths in the library's whole model of parameters on which nothing depends that is handed on.
        constants: what begins with the same number everywhere, by general path.
        parts: how many rows of the language model's width lie side by side in each.
        one_call: whether attention over all images can be one call.
    """

    problem: str = ""
    parts: int = 1
    one_call: bool = False
    idle: frozenset[str] = frozenset()
    constants: Mapping[str, float] = attrs.field(factory=dict)

    def encoder(self, config: HfImagesConfig) -> HfImages:
        """Return the encoder of a config that was tried."""
        return HfImages(config, idle=self.idle, constant=self.constants.get, one_call=self.one_call)


_TRIED: dict[str, TriedImages] = {}
_PLANS: dict[str, TensorPlan | str] = {}


def build_images(config: HfImagesConfig, hidden: int) -> HfImages:
    """Return the encoder of a config.

    Raises:
        ConfigError: the language model's rows have another width; or a thin encoder doesn't compute of each image in a
            batch what the library computes of it alone, makes another number of rows than its ``images`` say, draws
            random numbers or changes what isn't trained.
    """
    tried = tried_of(config)
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
    thin = thin_images(config)
    key = json.dumps(attrs.asdict(thin), sort_keys=True)
    if key not in _TRIED:
        try:
            with trying():
                _TRIED[key] = _try(thin)
        except (UserError, _UnfitError) as error:
            _TRIED[key] = TriedImages(problem=str(error))
        except Exception as error:  # noqa: BLE001 - whatever a model of the library does
            _TRIED[key] = TriedImages(problem=f"a thin one that fails with {type(error).__name__}: {error}")
    return _TRIED[key]


def tensor_splits(encoder: HfImages, axis: TensorAxis) -> dict[str, Split]:
    """Hand ``axis`` to an encoder, and return how its parameters lie by `plan_of` its tower."""
    return {} if axis.size == 1 else _split(encoder, axis, plan_of(encoder.config))


def plan_of(config: HfImagesConfig) -> TensorPlan:
    """Return the plan that was found right for a tower.

    Raises:
        ConfigError: there is none.
    """
    key = repr(config)
    if key not in _PLANS:
        with trying():
            _PLANS[key] = _plan_of(thin_images(config))
    return right_plan(_PLANS[key], config.model_type)


def thin_images(config: HfImagesConfig, *, has_all_text: bool = False) -> HfImagesConfig:
    """Return the config of a whole model with all layers of the tower of another, of small widths.

    Images, patches and how they are joined stay as they are, since the number of rows follows from them.

    Args:
        config: of the other one.
        has_all_text: whether the language model has all layers too, instead of one.
    """
    library = config.library()
    thin_text = thin_values(library.text_config)
    if not has_all_text:
        kinds = {key: one[:1] for key, one in thin_text.items() if key.endswith("layer_types") and one}
        thin_text |= {"num_hidden_layers": 1, **kinds}
    # Ids don't matter to what is tried, so that one trial serves models that differ in them.
    values = {key: one for key, one in thin_whole(library, thin_text).items() if not key.endswith(_IDS)}
    return HfImagesConfig(model_type=config.model_type, values=values, images=config.images)


def thin_whole(library: Any, thin_text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config of a whole model with all layers of the tower of another, of small widths.

    Args:
        library: config of the other.
        thin_text: keys of the language model.
    """
    tower, text = library.vision_config, library.text_config
    thin_tower = {**thin_values(tower), **{key: size for key, size in _THIN_TOWER.items() if hasattr(tower, key)}}
    thin_tower |= {key: getattr(tower, key) for key in _KEPT if hasattr(tower, key)}
    sections = {"vision_config": (tower, thin_tower), "text_config": (text, thin_text)}
    others = {key: one for key, one in library.to_dict().items() if key not in sections}
    values = json.loads(json.dumps(others, default=str))
    # What is as wide as the language model stays so.
    for keys in (thin_tower, values):
        keys |= {
            key: thin_text["hidden_size"]
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


class _UnfitError(Exception):
    """A thin encoder can't be trained; the message says why."""


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
            got = f"{len(wanted[-1])} rows of an image of {size[0]} x {size[1]}, where {processing.rows(size)} are said"
            raise _UnfitError(got)
    rows = torch.cat(wanted)
    _check(encoder, items, rows)
    with torch.enable_grad():
        found = encoder(items)
        (found * torch.randn_like(found)).sum().backward()
    there = encoder.published(whole)
    idle = frozenset(there[name].name for name, one in encoder.named_parameters() if one.grad is None)
    one_call = _is_one_call(HfImages(config, constant=constants.get, one_call=True), whole, items, rows)
    return TriedImages(idle=idle, constants=constants, parts=rows.shape[1] // config.hidden, one_call=one_call)


def _check(encoder: HfImages, items: Sequence[Mapping[str, Tensor]], rows: Tensor) -> None:
    """Refuse an encoder that doesn't make these rows of images in a batch, or does more than that.

    Raises:
        _UnfitError: saying what it does.
    """
    fixed = {name: tensor.clone() for name, tensor in fixed_tensors(encoder)}
    chance = torch.get_rng_state()
    found = encoder(items)
    if not torch.equal(chance, torch.get_rng_state()):
        raise _UnfitError("a thin one draws random numbers while it trains")
    if found.shape != rows.shape:
        raise _UnfitError(f"rows of a thin one of the shape {tuple(found.shape)} in a batch of images")
    difference = float((found - rows).abs().max() / rows.abs().max())
    if not difference <= _TOLERANCE:
        raise _UnfitError(f"rows of a thin one that differ by {difference:.1e} in a batch of images")
    if encoder([]).shape != rows[:0].shape:
        raise _UnfitError("no rows without an image")
    if changed := [name for name, tensor in fixed_tensors(encoder) if not torch.equal(tensor, fixed[name])]:
        raise _UnfitError(f"{', '.join(changed)} of a thin one that change while it trains")


def _is_one_call(encoder: HfImages, whole: Any, items: Sequence[Mapping[str, Tensor]], rows: Tensor) -> bool:
    """Tell whether a tower hands all images to one call of attention, and makes the same rows so."""
    try:
        encoder.read(whole)
        _check(encoder, items, rows)
    except Exception:  # noqa: BLE001 - whatever a model of the library does with attention of another form
        return False
    return makes_one_call(encoder.encoder)


def _split(encoder: nn.Module, axis: TensorAxis, plan: TensorPlan) -> dict[str, Split]:
    assert isinstance(encoder, HfImages)
    return split_linears(encoder.encoder, axis, plan, heads=Heads(), at="encoder")


def _plan_of(config: HfImagesConfig) -> TensorPlan | str:
    tried = tried_of(config)
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

    return find_plan(make, run, _split, plans(library.vision_config, None))
