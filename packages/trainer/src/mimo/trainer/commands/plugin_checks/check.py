"""``mimo plugins --check``: an installed plugin of any kind, before the conformance kit or what there is of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mimo.data import DATASETS, TOKENIZERS, AnswerMetricSpec
from mimo.hooks import ConfigError, Kind, PluginError, PluginFailure, survey
from mimo.model import (
    ENCODERS,
    GENERATORS,
    LANGUAGE_MODELS,
    EncoderSpec,
    GeneratorSpec,
    LanguageModelSpec,
    noun_of,
)
from mimo.optimizer import OPTIMIZERS, OptimizerSpec
from mimo.schedule import SCHEDULES
from mimo.trainer.commands.plugin_checks.kinds import (
    check_dataset,
    check_lifecycle,
    check_schedule,
    check_settings,
    check_tokenizer,
    look,
)
from mimo.trainer.config.plugin_kinds import KINDS, find_installed
from mimo.trainer.config.structure import structure, suggest
from mimo.trainer.config.toml import override_key

if TYPE_CHECKING:
    from PIL import Image

    from mimo.model.testing import Verdict

_PICTURES = ((64, 64), (37, 90), (120, 45), (16, 16), (200, 3), (1, 1))
"""Width and height of each, in pixels: also such as people's data have where nobody looked."""
_SMALL = 32
"""No number in the settings of a language model is made smaller than half of this."""
_ANSWERS = ("", " ", "A zebra.", "zebra", "the 3 zebras\n", "é😀")
_LIFECYCLE = "mimo.lifecycle"


def check_plugin(name: str, settings: Iterable[str]) -> Iterator[Verdict]:
    """Yield verdicts on an installed plugin, on each of them where several kinds have one of this name.

    An encoder, a language model and a generator are looked at whole; of other kinds what one process can see. Sizes of
    a language model that are left at their default are made small.

    Args:
        name: what users write as ``plugin``, or the entry point of a lifecycle plugin.
        settings: ``key=value`` words, of its config; small sizes make it quick.

    Raises:
        ConfigError: no plugin has this name, or a setting is unknown or wrong.
        PluginError: it can't be loaded; or an encoder reads, or a generator makes, something else than pictures, and
            brings no examples of it.
    """
    table: Mapping[str, Any] = {}
    for word in settings:
        table = override_key(table, word)
    return _check_all(_kinds_of(name), name, table)


def _kinds_of(name: str) -> list[Kind[Any] | None]:
    """Return the kinds that have a plugin of this name; None for the lifecycle."""
    rows = survey(KINDS)
    groups, known = set(), set()
    for row in rows:
        names = {row.name} if isinstance(row, PluginFailure) or row.group == _LIFECYCLE else {*row.specs}
        known |= names
        if name in names:
            if isinstance(row, PluginFailure):
                raise row.error
            groups.add(row.group)
    if not groups:
        raise ConfigError(
            "--check", expected="the name of an installed plugin", got=repr(name), fix=suggest(name, known)
        )
    return [kind for kind in KINDS if kind.group in groups] + ([None] if _LIFECYCLE in groups else [])


def _check_all(kinds: Iterable[Kind[Any] | None], name: str, table: Mapping[str, Any]) -> Iterator[Verdict]:
    for kind in kinds:
        if kind is None:
            yield from check_lifecycle(name)
            continue
        spec = find_installed(kind, name, "--check")
        if isinstance(spec, AnswerMetricSpec):
            if table:
                raise ConfigError("config", expected="no settings, as a metric of answers has none", got=str(table))
            yield look("scores", _scores, spec)
            continue
        config = structure(table, spec.config, "config")
        yield from check_settings(table, spec.config)
        yield from _CHECKS.get(kind.group, _nothing_more)(spec, config)


def _check_encoder(spec: EncoderSpec, config: Any) -> Iterator[Verdict]:
    from mimo.model.testing import check_encoder

    return check_encoder(spec, _examples(spec, config), config=config)


def _check_generator(spec: GeneratorSpec, config: Any) -> Iterator[Verdict]:
    from mimo.model.testing import check_generator

    return check_generator(spec, _examples(spec, config), config=config)


def _check_language_model(spec: LanguageModelSpec, config: Any) -> Iterator[Verdict]:
    from mimo.model.testing import check_language_model

    small = _with_small_sizes(config)
    works = all(verdict.broken is None for verdict in check_language_model(spec, config=small, checks=["rows"]))
    return check_language_model(spec, config=small if works else config)


def _check_optimizer(spec: OptimizerSpec, config: Any) -> Iterator[Verdict]:
    from mimo.trainer.commands.plugin_checks.optimizer import check_optimizer

    return check_optimizer(spec, config)


def _scores(spec: AnswerMetricSpec) -> None:
    """It returns a finite number for any two texts, and the same again."""
    for answer in _ANSWERS:
        for reference in _ANSWERS:
            first, again = spec.score(answer, reference), spec.score(answer, reference)
            assert math.isfinite(first), f"the score of {answer!r} beside {reference!r} is {first!r}"
            assert first == again, f"the score of {answer!r} beside {reference!r} is {first!r}, then {again!r}"


def _nothing_more(_spec: Any, _config: Any) -> Iterator[Verdict]:
    return iter(())


_CHECKS: Mapping[str, Callable[[Any, Any], Iterator[Verdict]]] = {
    ENCODERS.group: _check_encoder,
    LANGUAGE_MODELS.group: _check_language_model,
    GENERATORS.group: _check_generator,
    OPTIMIZERS.group: _check_optimizer,
    SCHEDULES.group: check_schedule,
    DATASETS.group: check_dataset,
    TOKENIZERS.group: check_tokenizer,
}


def _with_small_sizes(config: Any) -> Any:
    """Return settings whose large numbers, where they are the defaults, are halved as often as the settings allow."""
    for field in attrs.fields(type(config)):
        size = getattr(config, field.name)
        if type(size) is not int or size != field.default:
            continue
        while size > _SMALL and size % 2 == 0:
            size //= 2
            try:
                config = attrs.evolve(config, **{field.name: size})
            except ValueError:
                break
    return config


def _examples(spec: EncoderSpec | GeneratorSpec, config: Any) -> Sequence[Any]:
    if spec.examples is not None:
        return spec.examples(config)
    if spec.modality != "image":
        raise PluginError(
            "--check",
            expected=f"a plugin of images, or one with examples of {spec.modality!r}",
            got=f"{noun_of(spec)} {spec.name!r} without any",
            fix="Add to its spec: examples=lambda config: [item, larger_item].",
        )
    return [_picture(*size) for size in _PICTURES]


def _picture(width: int, height: int) -> Image.Image:
    """Return a picture in which no two pixels are equal."""
    from PIL import Image

    gradients = (Image.linear_gradient("L"), Image.linear_gradient("L").rotate(90), Image.radial_gradient("L"))
    return Image.merge("RGB", [gradient.resize((width, height)) for gradient in gradients])
