"""The dataset ``mixture``: samples of its sources under numbers of its own, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from mimo.data import DataPart, DatasetSpec, parts_of
from mimo.data.sources.mixture import MixtureConfig, SourceConfig, join_sources, source_tables
from mimo.hooks import ConfigError, DataError, ItemInfo, ItemRole


@attrs.frozen
class Source:
    """So many samples of one image each; ``extra`` is what it has besides."""

    name: str
    samples: int
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    role: ItemRole = ""

    def __len__(self) -> int:
        return self.samples

    def __getattr__(self, name: str) -> Any:
        """Return what else it has."""
        try:
            return self.extra[name]
        except KeyError:
            raise AttributeError(name) from None

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the sample's number, refused from 90 on."""
        if sample >= 90:
            raise ConfigError("data.chat.template", expected="one", got="none")
        return [len(self.name), sample]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return its image."""
        return [ItemInfo(sample=sample, index=0, modality="image", size=(1, 1), role=self.role)]

    def raw(self, sample: int, index: int) -> Any:
        """Return an image that no other sample has."""
        if sample == 2:
            raise DataError(self.where(sample), expected="an image", got="none")
        return self.name, sample, index

    def where(self, sample: int) -> str:
        """Name a sample."""
        return f"{self.name}:{sample}"


def config_of(**sources: Mapping[str, Any]) -> MixtureConfig:
    """Return the settings of a mixture of sources of the plugin ``own``."""
    return MixtureConfig(sources={name: SourceConfig(plugin="own", **keys) for name, keys in sources.items()})


def mixture(split: Any = "train", *, sources: Mapping[str, Source | None], **keys: Mapping[str, float]) -> Any:
    """Return a split of a mixture of these."""
    config = config_of(**{name: keys.get(name, {}) for name in sources})
    opened = {f"sources.{name}": source for name, source in sources.items() if source is not None}
    return join_sources(config, opened, split)


def test_data_mixture_numbers_samples_source_after_source() -> None:
    """In the order of their names, whichever order the file has; items bear the number that the sample has here."""
    data = mixture(sources={"b": Source("bb", 3), "a": Source("a", 2)})
    assert len(data) == 5
    assert [data.where(sample) for sample in range(5)] == ["a:0", "a:1", "bb:0", "bb:1", "bb:2"]
    assert [data.tokens(sample) for sample in range(5)] == [[1, 0], [1, 1], [2, 0], [2, 1], [2, 2]]
    assert [info.sample for sample in range(5) for info in data.infos(sample)] == [0, 1, 2, 3, 4]
    assert data.raw(3, 0) == ("bb", 1, 0)
    with pytest.raises(DataError, match="bb:2: expected an image"):
        data.raw(4, 0)


def test_data_mixture_keeps_roles() -> None:
    """An item is read or made as its source says it."""
    data = mixture(sources={"a": Source("a", 1, role="output"), "b": Source("bb", 1)})
    assert [info.role for sample in range(2) for info in data.infos(sample)] == ["output", ""]


def test_data_mixture_passes_on_what_sources_may_have() -> None:
    """Weights of tokens and places to cut at; a source without has none."""
    extra = {"weights": lambda sample: [1.0, sample / 2], "ends": lambda sample: [sample]}
    data = mixture(sources={"a": Source("a", 2), "b": Source("b", 2, extra)})
    assert [data.weights(sample) for sample in range(4)] == [None, None, [1.0, 0.0], [1.0, 0.5]]
    assert [data.ends(sample) for sample in range(4)] == [None, None, [0], [1]]


def test_data_mixture_says_what_it_is_made_of() -> None:
    """Each source is a part with its weight or epochs, one epoch where nothing is said, and the shards that it has."""
    shards = {"parts": lambda: (DataPart(name="x", samples=4, shards=(1, 3)), DataPart(name="y", samples=2))}
    sources = {"a": Source("a", 2), "b": Source("b", 6, shards)}
    assert parts_of(mixture(sources=sources)) == (
        DataPart(name="a", samples=2, epochs=1.0, shards=(2,)),
        DataPart(name="b", samples=6, epochs=1.0, shards=(1, 3, 2)),
    )
    weighted = mixture(sources=sources, a={"weight": 2.0}, b={"weight": 0.5})
    assert [(part.weight, part.epochs) for part in parts_of(weighted)] == [(2.0, None), (0.5, None)]
    counted = mixture(sources=sources, a={"epochs": 2.0}, b={"epochs": 0.5})
    assert [(part.weight, part.epochs) for part in parts_of(counted)] == [(None, 2.0), (None, 0.5)]


def test_data_mixture_evaluates_on_sources_that_hold_some_out() -> None:
    """One after another; there is nothing to evaluate on where none does."""
    data = mixture("evaluation", sources={"a": None, "b": Source("b", 2), "c": Source("c", 1), "d": Source("d", 0)})
    assert [data.where(sample) for sample in range(len(data))] == ["b:0", "b:1", "c:0"]
    assert mixture("evaluation", sources={"a": None}) is None


def test_data_mixture_names_a_setting_by_its_path() -> None:
    """Also where it is found wrong only when a sample is read."""
    data = mixture(sources={"a": Source("a", 2), "b": Source("b", 91)})
    with pytest.raises(ConfigError, match=r"^data\.sources\.b\.chat\.template: expected one, got none"):
        data.tokens(92)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            {"a": Source("a", 1), "b": None},
            r"data\.sources\.b: expected samples to train on, got none\. Check its keys",
        ),
        ({"b": Source("b", 0)}, r"data\.sources\.b: expected samples to train on, got none"),
        (
            {"a": Source("a", 1, {"parts": lambda: [DataPart(name="x", samples=1, epochs=1.0)]})},
            r"data\.sources\.a\.plugin: expected a dataset that is no mixture itself, got 'own'\. Name its",
        ),
    ],
)
def test_data_mixture_refuses_sources_without_samples_and_mixtures(
    sources: Mapping[str, Source | None], message: str
) -> None:
    """By the source's path."""
    with pytest.raises(ConfigError, match=message):
        mixture(sources=sources)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, r"sources: expected at least one source, got none\. Add a table \[data\.sources\.<name>\]"),
        ({"1st": {}}, "sources: expected names of letters, digits and _ that don't begin with a digit, got '1st'"),
        ({"a.b": {}}, "sources: expected names of letters"),
        ({"a": {"weight": 1.0, "epochs": 2.0}}, r"sources\.a\.epochs: expected nothing beside weight, .* got 2"),
        (
            {"a": {"weight": 1.0}, "b": {}},
            r"sources\.b\.weight: expected a number, as a has one, got none\. Give all sources weight, or none\.",
        ),
        ({"a": {"weight": 1.0}, "b": {"epochs": 1.0}}, r"sources\.b\.weight: expected a number, as a has one"),
        ({"a": {"epochs": 1.0}, "b": {}}, r"sources\.b\.epochs: expected a number, as a has one"),
        *(
            ({"a": {key: value}}, f"{key}: expected a finite number above 0, got {value}")
            for key in ("weight", "epochs")
            for value in (0.0, -1.0, float("nan"), float("inf"))
        ),
    ],
)
def test_data_mixture_refuses_settings(sources: Mapping[str, Mapping[str, float]], message: str) -> None:
    """No sources, names that are none, weights that are none, and weights beside epochs."""
    with pytest.raises(ConfigError, match=message):
        config_of(**sources)


def test_data_mixture_names_the_tables_of_its_sources() -> None:
    """With the plugin's own keys, and those that a source has besides."""
    config = MixtureConfig(sources={"a": SourceConfig(plugin="own", weight=1.0, config={"path": "x"})})
    (path, table), *_ = source_tables(config).items()
    assert (path, table.plugin, table.keys, table.own) == (
        "sources.a",
        "own",
        {"path": "x"},
        ("plugin", "weight", "epochs"),
    )


def test_a_dataset_plugin_opens_itself_or_is_made_of_others() -> None:
    """One that does neither, or both, is refused."""
    with pytest.raises(ValueError, match="dataset 'own': expected either open or sources, got neither"):
        DatasetSpec(name="own", config=MixtureConfig)
