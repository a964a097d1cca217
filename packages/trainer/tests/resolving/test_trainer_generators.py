"""Generators in settings: what follows from them, and every refusal before launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from mimo.data import PlacedItem, SampleLayout, TokenizerSpec
from mimo.hooks import ConfigError, DataError, ItemInfo
from mimo.model import ContextSupport, EncoderSpec, GeneratorSpec, GeneratorStages
from mimo.topology import StageId
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.toml import make_settings
from mimo.trainer.job.generation_layout import check_layout
from mimo.trainer.job.job import Job
from mimo.trainer.job.taught import sent_items
from mimo.trainer.resolving.resolve import Purpose, resolve
from mimo.trainer.resolving.teachers import check_targets

LANGUAGE: Mapping[str, Any] = {
    "plugin": "decoder",
    "ranks": "0-1",
    "pp": 2,
    "config": {"hidden": 8, "layers": 2, "heads": 2, "intermediate": 16},
}
DRAWER: Mapping[str, Any] = {"plugin": "drawer", "ranks": "2-4", "fed_by": "language"}


@attrs.frozen(kw_only=True)
class NoConfig:
    pass


def _unused(*_arguments: Any) -> Any:
    raise AssertionError(_arguments)


class Mute:
    """A tokenizer that has a placeholder for nothing."""

    vocabulary, end = 300, 256

    def placeholder(self, modality: str) -> int:
        raise ConfigError("tokenizer.placeholders", expected=f"one for {modality!r}", got="none")


def _mute(_config: NoConfig, _modalities: Sequence[str]) -> Any:
    return Mute()


STUBS: Mapping[str, Any] = {
    "drawer": GeneratorSpec(
        name="drawer",
        config=NoConfig,
        measure=_unused,
        targets=_unused,
        prepare=_unused,
        build=_unused,
        parts={"all": ("all",)},
    ),
    "wide": GeneratorSpec(
        name="wide",
        config=NoConfig,
        measure=_unused,
        targets=_unused,
        prepare=_unused,
        build=_unused,
        context=ContextSupport(attach=_unused),
        parts={"all": ("all",)},
    ),
    "staged": GeneratorSpec(
        name="staged",
        config=NoConfig,
        measure=_unused,
        targets=_unused,
        prepare=_unused,
        build=_unused,
        generate=_unused,
        save=_unused,
        parts={"all": ("all",)},
        stages=GeneratorStages(
            layers=lambda _config: 4,
            message_rows=lambda _config, size, rows: size[0] + rows,
            width=lambda _config: 5,
            cut=_unused,
            parts=lambda _config, _stage: frozenset({"all"}),
        ),
    ),
    "eye": EncoderSpec(
        name="eye",
        config=NoConfig,
        measure=_unused,
        rows=_unused,
        prepare=_unused,
        build=_unused,
        parts={"all": ("all",)},
    ),
    "mute": TokenizerSpec(name="mute", config=NoConfig, build=_mute),
}
"""Generators and an encoder that nobody can build, and a tokenizer without placeholders."""


def table(tokenizer: str = "byte", **modules: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a generator and a language model, with modules that differ."""
    return {
        "run": {"name": "drawn", "steps": 1, "global_batch": 4},
        "data": {"plugin": "mock"},
        "tokenizer": {"plugin": tokenizer},
        "modules": {"language": LANGUAGE, "drawer": DRAWER, **modules},
    }


def job_of(settings: Mapping[str, Any], purpose: Purpose = "import") -> Job:
    """Return the job of settings."""

    def find(kind: Any, name: str, where: str) -> Any:
        return STUBS.get(name) or find_installed(kind, name, where)

    return resolve(make_settings(settings), purpose=purpose, find=find, needs_data=False)


def test_what_follows_from_a_generator() -> None:
    """It is fed by the last stage with rows of its width; what it makes has a placeholder."""
    job = job_of(table())
    (drawer,), (edge,) = job.generators, [edge for edge in job.graph.edges if edge.is_boundary]
    assert (edge.source, edge.target, edge.gradient) == (StageId("language", 1), StageId("drawer", 0), True)
    assert job.carried_by(edge) is drawer
    assert (job.width(edge), job.row_bytes(edge)) == (8, 8 * 4)
    assert drawer.grid.dp == 3
    assert job.beside == (drawer,)
    assert job.item_modules == (drawer,)
    assert job.tokenizer.placeholder("image") == 257


def test_stages_of_a_generator_send_rows_that_its_plugin_counts() -> None:
    """By the size of an item and how many rows it is made from; nothing is made in stages."""
    job = job_of(table(drawer={**DRAWER, "plugin": "staged", "pp": 3}))
    edges = [edge for edge in job.graph.edges if edge.target.module == "drawer"]
    assert [edge.name for edge in edges] == ["language->drawer", "drawer.0-1", "drawer.1-2"]
    assert [job.width(edge) for edge in edges] == [8, 5, 5]
    assert job.message_rows(edges[1], (7, 2), 30) == 37
    whole = {**LANGUAGE, "pp": 1, "tp": 2}
    drawing = job_of(table(language=whole, drawer={**DRAWER, "plugin": "staged", "ranks": "0-1", "pp": 2}))
    with pytest.raises(ConfigError, match=r"modules\.drawer: expected a module on rank.* whole or split by tp"):
        check_layout(drawing)


def test_a_modality_may_be_read_and_made() -> None:
    """By one placeholder."""
    job = job_of(table(vision={"plugin": "eye", "ranks": "0"}))
    assert [module.modality for module in job.item_modules] == ["image", "image"]
    assert job.language.config.vocabulary == 258
    assert job.graph.order.index("vision") < job.graph.order.index("language") < job.graph.order.index("drawer")


def test_an_encoder_may_feed_a_generator() -> None:
    """Beside one that reads the same for the language model; its rows are as wide as that one's."""
    job = job_of(table(vision={"plugin": "eye", "ranks": "0"}, lens={"plugin": "eye", "ranks": "1", "feeds": "drawer"}))
    (drawer,), lens = job.generators, job.module("lens")
    assert [edge.source.module for edge in job.graph.inputs(StageId("drawer", 0))] == ["language", "lens"]
    assert job.generators_of(lens) == (drawer,)
    assert job.generators_of(job.module("vision")) == ()
    assert job.encoders_of(drawer) == (lens,)
    (edge,) = job.graph.outputs(StageId("lens", 0))
    assert job.carried_by(edge) is lens
    assert job.width(edge) == 8
    assert not lens.is_of_teacher


def test_an_encoder_may_feed_the_language_model_and_a_generator() -> None:
    """The same rows: to the generator those alone of what stands before an item that it makes."""
    job = job_of(table(vision={"plugin": "eye", "ranks": "0", "feeds": ["language", "drawer"]}))
    (drawer,), vision = job.generators, job.module("vision")
    assert job.encoders_of(drawer) == job.encoders_of(job.language) == (vision,)
    assert job.feeders_of(drawer) == (vision, job.language)
    into_language, into_drawer = job.graph.outputs(StageId("vision", 0))
    assert [job.sends_some(edge) for edge in (into_language, into_drawer)] == [False, True]
    assert job.plain["modules"]["vision"]["feeds"] == ["language", "drawer"]


def placed(index: int, start: int, rows: int, *, is_made: bool = False) -> PlacedItem:
    """Return a picture that begins somewhere in a sample, to be read, or to be made by a placeholder."""
    info = ItemInfo(sample=0, index=index, modality="image", size=(1,))
    if is_made:
        return PlacedItem(info=info, runs=(), asked=(start, start + 1), made_from=(0, start))
    return PlacedItem(info=info, runs=((start, start + rows),))


@pytest.mark.parametrize(
    ("items", "sent"),
    [
        ([placed(0, 0, 2), placed(1, 3, 0, is_made=True), placed(2, 4, 2)], [0]),
        ([placed(0, 0, 0), placed(1, 0, 2), placed(2, 2, 0, is_made=True)], [0, 1]),
        ([placed(0, 0, 0, is_made=True), placed(1, 1, 2)], []),
        ([placed(0, 0, 0), placed(1, 0, 2)], []),  # nothing is made, and the first has no rows
    ],
)
def test_a_generator_is_sent_what_stands_before_its_last_item(items: Sequence[PlacedItem], sent: Sequence[int]) -> None:
    """Of the items that the language model reads with it."""
    job = job_of(table(vision={"plugin": "eye", "ranks": "0", "feeds": ["language", "drawer"]}))
    (drawer,), vision = job.generators, job.module("vision")
    ids = np.zeros(8, dtype=np.int64)
    layout = SampleLayout(sample=0, tokens=ids, labels=ids, items=tuple(items), truncated=False)
    assert [item.info.index for item in sent_items(job, vision, drawer, layout)] == sent
    assert sent_items(job, vision, job.language, layout) == layout.items_of("image")


class Listed:
    """As much of a dataset as says which items samples have."""

    def __init__(self, *samples: Sequence[ItemInfo] | DataError, more: int = 0) -> None:
        self.samples, self.more = samples, more

    def __len__(self) -> int:
        return len(self.samples) + self.more

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        found = self.samples[sample]
        if isinstance(found, DataError):
            raise found
        return found


@pytest.mark.parametrize(
    ("roles", "reads", "has_targets"),
    [
        (["output"], True, True),
        (["input", "both"], True, True),
        ([""], False, True),
        ([""], True, False),
        (["input"], False, False),
        ([], True, False),
    ],
)
def test_a_loss_without_targets_is_refused(roles: Sequence[Any], reads: bool, has_targets: bool) -> None:
    """An item is made by its role, or if it has none where nothing reads its modality."""
    vision: Any = {"vision": {"plugin": "eye", "ranks": "0"}} if reads else {}
    job = job_of(table(**vision))
    items = [ItemInfo(modality="image", sample=1, index=0, size=(2, 2), role=role) for role in roles]
    sound = ItemInfo(modality="sound", sample=0, index=9, size=(2, 2), role="output")
    data: Any = Listed([sound], [sound, *items])
    if has_targets:
        check_targets(attrs.evolve(job, train=data))
        return
    text = (
        r"^modules\.drawer\.loss_weight: expected 0, as none of the 2 samples has an item of modality 'image' that is "
        r"to be made, got 1\.0\. Give such items the role 'output' or 'both' in the data, or leave the module out\.$"
    )
    with pytest.raises(ConfigError, match=text):
        check_targets(attrs.evolve(job, train=data))
    unweighted = tuple(attrs.evolve(module, loss_weight=0.0) for module in job.modules)
    check_targets(attrs.evolve(job, train=data, modules=unweighted))


def test_targets_of_data_that_are_not_known_are_not_missed() -> None:
    """Neither of more samples than are looked at, nor of one that can't be read."""
    job, nothing = job_of(table()), list[ItemInfo]()
    broken: Any = Listed(nothing, DataError("data.path: line 2", expected="an object", got="none"), nothing)
    check_targets(attrs.evolve(job, train=broken))
    many: Any = Listed(more=4097)
    check_targets(attrs.evolve(job, train=many))


def test_generators_stay_while_the_language_model_writes() -> None:
    """As it may call for what they make."""
    job = job_of(table(language={**LANGUAGE, "ranks": "0", "pp": 1}, drawer={**DRAWER, "ranks": "0"}), "generate")
    assert [module.name for module in job.modules] == ["language", "drawer"]
    with pytest.raises(ConfigError, match=r"modules.drawer.plugin: expected a generator with `generate` and `save`"):
        check_layout(job)


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "fed by another": (
        table(drawer={**DRAWER, "fed_by": "vision"}),
        (
            "modules.drawer.fed_by: expected 'language', whose rows feed all generators, got 'vision'. Where an "
            'encoder is to feed it too, set feeds = "drawer" in that one\'s table.'
        ),
    ),
    "the language model itself": (
        table(language={**LANGUAGE, "fed_by": "language"}),
        (
            "modules.language.fed_by: expected nothing, as this module is the language model, got 'language'. Leave it "
            "out, or put it into the table of a generator."
        ),
    ),
    "a circle": (
        table(drawer={**DRAWER, "feeds": "drawer"}),
        (
            "modules.drawer.feeds: expected nothing beside fed_by, which makes the module a generator, got 'drawer'. "
            "Leave one of the two out."
        ),
    ),
    "a teacher": (
        table(drawer={**DRAWER, "distil": {"top_k": 1}}),
        "modules.drawer.distil: expected nothing beside fed_by, which makes the module a generator, got ",
    ),
    "ahead": (
        table(drawer={**DRAWER, "prefetch": True}),
        (
            "modules.drawer.prefetch: expected false, as a generator reads rows that the language model makes in their "
            "own step, got true. Leave it out."
        ),
    ),
    "padded": (
        table(drawer={**DRAWER, "round_rows": 8}),
        "modules.drawer.round_rows: expected 1, as a generator makes the rows of its items and no others, got 8.",
    ),
    "context ranks": (
        table(drawer={**DRAWER, "cp": 3}),
        "modules.drawer.cp: expected 1, since generator 'drawer' has no context parallelism, got 3.",
    ),
    "a weight without targets": (
        table(vision={"plugin": "eye", "ranks": "0", "loss_weight": 0.5}),
        "modules.vision.loss_weight: expected 1, as an encoder has no targets of its own, got 0.5. Leave it out.",
    ),
    "two of a modality": (
        table(other={**DRAWER, "ranks": "0"}),
        "modules.other.modality: expected a modality that no other module makes, got 'image', which drawer makes.",
    ),
    "an encoder of nobody": (
        table(lens={"plugin": "eye", "ranks": "0", "feeds": "artist"}),
        (
            "modules.lens.feeds: expected 'language', a teacher (a module with a table distil), or a generator (one "
            "with fed_by): drawer, got 'artist'"
        ),
    ),
    "an encoder of what the language model doesn't read": (
        table(lens={"plugin": "eye", "ranks": "0", "feeds": "drawer"}),
        (
            "modules.lens.modality: expected one that modules.language reads too, as all are shown the same samples, "
            "got 'image'. Add an encoder of it with feeds = \"language\"."
        ),
    ),
    "an encoder of a generator and nobody": (
        table(vision={"plugin": "eye", "ranks": "0", "feeds": ["language", "artist"]}),
        (
            "modules.vision.feeds: expected a list of any of 'language' and the generators (with fed_by): drawer, got "
            "['language', 'artist']"
        ),
    ),
    "an encoder of a teacher among others": (
        table(
            vision={"plugin": "eye", "ranks": "0", "feeds": ["language", "teacher"]},
            teacher={"plugin": "tiny", "ranks": "0", "distil": {"top_k": 1}},
        ),
        (
            "modules.vision.feeds: expected a list of any of 'language' and the generators (with fed_by): drawer, got "
            "['language', 'teacher']. Give a teacher an encoder of its own."
        ),
    ),
    "an encoder that feeds nothing": (
        table(vision={"plugin": "eye", "ranks": "0", "feeds": []}),
        "modules.vision.feeds: expected a list of any of 'language' and the generators (with fed_by): drawer, got []",
    ),
    "an encoder that feeds one twice": (
        table(vision={"plugin": "eye", "ranks": "0", "feeds": ["language", "language"]}),
        "modules.vision.feeds: expected each module once, got ['language', 'language']",
    ),
    "two encoders of a modality": (
        table(
            vision={"plugin": "eye", "ranks": "0", "feeds": ["language", "drawer"]},
            lens={"plugin": "eye", "ranks": "1", "feeds": "drawer"},
        ),
        "modules.lens.modality: expected a modality that no other module reads, got 'image', which vision reads.",
    ),
    "no placeholder": (table(tokenizer="mute"), "tokenizer.placeholders: expected one for 'image', got none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_generators_that_cannot_be_are_refused(case: str) -> None:
    """By the path of the setting."""
    settings, text = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        job_of(settings)
    assert str(error.value).startswith(text)


def test_some_loss_must_weigh_something() -> None:
    """That of a generator is enough."""
    settings = table(language={**LANGUAGE, "loss_weight": 0.0}, drawer={**DRAWER, "loss_weight": 0.0})
    with pytest.raises(ConfigError, match="unless the loss_weight of a teacher or generator is one"):
        job_of(settings, "train")
