"""What teachers, generators and the language model must agree on, and that there is anything to learn from."""

from __future__ import annotations

from collections.abc import Sequence

from mimo.hooks import ConfigError, ItemInfo, UserError
from mimo.model import EncoderSpec, LanguageModelSpec
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.job.job import Job, JobModule
from mimo.trainer.resolving.modules import check_distils

_LOOKED_AT = 4096
"""So many samples may be looked at for an item to make; the first that has one ends it."""


def check_teachers(modules: Sequence[JobModule], *, trains: bool) -> None:
    """Refuse teachers that the language model can't learn from, and losses that all weigh nothing.

    A teacher has another vocabulary, fewer ids than it is to send, rows of another width than are compared, items that
    not all read, or a student whose plugin can't be taught.

    Args:
        modules: of the job, each with its vocabulary.
        trains: whether anything is to be learned.

    Raises:
        ConfigError: by the path of the setting.
    """
    language = next(module for module in modules if module.name == LANGUAGE)
    teachers = [module for module in modules if module.distil is not None]
    generators = [module for module in modules if module.is_generator]
    if trains and not any(module.is_learned_from for module in (language, *teachers, *generators)):
        raise ConfigError(
            f"modules.{LANGUAGE}.loss_weight",
            expected="a number above 0, unless the loss_weight of a teacher or generator is one, or a hidden_weight",
            got="0, so that nothing would be learned",
            fix="Leave it out, or add a teacher: a module with a table distil.",
        )
    if any(teacher.sends_ids for teacher in teachers):
        assert isinstance(language.spec, LanguageModelSpec)
        check_distils(f"modules.{LANGUAGE}", language.spec)
    for teacher in teachers:
        _check(teacher, language)
    _check_modalities(modules, teachers)
    for module in modules:
        if module.feeds_language and isinstance(module.spec, EncoderSpec) and len(module.feeds) > 1:
            _check_width(module, language)


def check_targets(job: Job) -> None:
    """Refuse a generator with a loss in a run whose data have nothing for it to make.

    Of data with more than `_LOOKED_AT` samples it isn't known, nor of those that can't be read.

    Raises:
        ConfigError: by the path of the loss's weight.
    """
    train = job.train
    if train is None or len(train) > _LOOKED_AT:
        return
    read = {one.modality for one in job.modules if isinstance(one.spec, EncoderSpec) and one.feeds_language}
    for generator in job.generators:
        if not generator.loss_weight:
            continue

        def is_made(item: ItemInfo, modality: str = generator.modality) -> bool:
            role = item.role or ("input" if modality in read else "output")
            return item.modality == modality and role != "input"

        try:
            has_targets = any(is_made(item) for sample in range(len(train)) for item in train.infos(sample))
        except UserError:
            return
        if not has_targets:
            raise ConfigError(
                f"modules.{generator.name}.loss_weight",
                expected=f"0, as none of the {len(train)} samples has an item of modality {generator.modality!r} that "
                "is to be made",
                got=repr(generator.loss_weight),
                fix="Give such items the role 'output' or 'both' in the data, or leave the module out.",
            )


def _check(teacher: JobModule, language: JobModule) -> None:
    own, wanted = (_vocabulary(module) for module in (teacher, language))
    if own != wanted:
        raise ConfigError(
            f"modules.{teacher.name}.config.vocabulary",
            expected=f"the {wanted} ids of modules.{LANGUAGE}, as both read and write by one tokenizer",
            got=repr(own),
            fix="Take a teacher with the same tokenizer.",
        )
    assert teacher.distil is not None
    if teacher.distil.top_k > own:
        raise ConfigError(
            f"modules.{teacher.name}.distil.top_k",
            expected=f"at most the {own} ids that there are",
            got=repr(teacher.distil.top_k),
        )
    width, wanted_width = (_width(module) for module in (teacher, language))
    if teacher.distil.compares_hidden and width != wanted_width:
        raise ConfigError(
            f"modules.{teacher.name}.distil.hidden",
            expected=f"'none', or a teacher of rows as wide as the {wanted_width} numbers of modules.{LANGUAGE}",
            got=f"{teacher.distil.hidden!r}, and rows of {width}",
            fix="Take a teacher of that width, or learn by its ids alone: no projection between widths is learned.",
        )


def _check_width(encoder: JobModule, language: JobModule) -> None:
    """Refuse an encoder of the language model and of generators where these take rows of other widths."""
    assert isinstance(language.spec, LanguageModelSpec)
    width, wanted = language.spec.row_width(language.config), _width(language)
    if width != wanted:
        raise ConfigError(
            f"modules.{encoder.name}.feeds",
            expected=f"{LANGUAGE!r} alone, as that takes rows of {width} numbers, and generators of {wanted}",
            got=repr(list(encoder.feeds)),
            fix="Give the generators an encoder of their own.",
        )


def _check_modalities(modules: Sequence[JobModule], teachers: Sequence[JobModule]) -> None:
    """Refuse an encoder of a modality that the language model doesn't read; a teacher's, if another teacher doesn't."""
    read = {
        module.name: {other.modality for other in modules if other.modality and module.name in other.feeds}
        for module in modules
    }
    for module in modules:
        if isinstance(module.spec, EncoderSpec):
            for other in (LANGUAGE, *(teacher.name for teacher in teachers if module.is_of_teacher)):
                if module.modality not in read[other]:
                    raise ConfigError(
                        f"modules.{module.name}.modality",
                        expected=f"one that modules.{other} reads too, as all are shown the same samples",
                        got=repr(module.modality),
                        fix=f'Add an encoder of it with feeds = "{other}".',
                    )


def _vocabulary(module: JobModule) -> int:
    assert isinstance(module.spec, LanguageModelSpec), module.name
    return module.spec.vocabulary(module.config)


def _width(module: JobModule) -> int:
    assert isinstance(module.spec, LanguageModelSpec), module.name
    return module.spec.hidden(module.config)
