"""`mimo plugins --check` on plugins that break a promise, and where two plugins have one name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from mimo.data import DatasetSpec
from mimo.hooks import ItemInfo, PluginError, discover
from mimo.model import GENERATORS, GeneratorSpec
from mimo.model.testing import Verdict
from mimo.optimizer import OPTIMIZERS
from mimo.trainer.commands.plugin_checks import check as _check
from mimo.trainer.commands.plugin_checks.kinds import check_dataset, check_settings
from mimo.trainer.commands.plugin_checks.optimizer import check_optimizer


def broken(verdicts: Iterator[Verdict]) -> dict[str, str]:
    """Return what is broken and how, by the name of the check."""
    return {verdict.check: verdict.broken for verdict in verdicts if verdict.broken is not None}


def test_all_plugins_of_a_name_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds may have one of the same name: both have settings."""
    monkeypatch.setattr(_check, "_kinds_of", lambda _name: [OPTIMIZERS, OPTIMIZERS])
    assert [verdict.check for verdict in _check.check_plugin("adamw", ())].count("defaults") == 2


@attrs.frozen(kw_only=True)
class Config:
    """Settings without limits."""

    share: float = 0.5


@attrs.frozen(kw_only=True)
class NoSettings:
    """No settings."""


@attrs.define
class Samples:
    """Two samples of an image each, well or not."""

    ids: list[int]
    sizes: Iterator[int]
    given: list[float] | None

    def __len__(self) -> int:
        return 2

    def tokens(self, _sample: int) -> list[int]:
        return self.ids

    def weights(self, _sample: int) -> list[float] | None:
        return self.given

    def infos(self, sample: int) -> list[ItemInfo]:
        side = next(self.sizes)
        return [ItemInfo(sample=sample, index=0, modality="image", size=(side, side))]

    def raw(self, _sample: int, _index: int) -> Any:
        return b""

    def where(self, sample: int) -> str:
        return f"samples:{sample}"


def dataset(
    text: str, sizes: Callable[[], Iterator[int]], *, ends: bool = True, weights: list[float] | None = None
) -> DatasetSpec:
    """Return a dataset whose samples all say ``text``."""

    def open_split(_config: Any, tokenizer: Any, split: str) -> Samples | None:
        ids = [*tokenizer.encode(text), *([tokenizer.end] if ends else [])]
        return Samples(ids, sizes(), weights) if split == "train" else None

    return DatasetSpec(name="own", config=Config, open=open_split)


def eights() -> Iterator[int]:
    """Yield 8 for ever."""
    while True:
        yield 8


def test_a_dataset_that_breaks_a_promise_is_named() -> None:
    """Placeholders and ends that are missing, and answers that change from one time to the next."""
    assert broken(check_dataset(dataset("<image> a", eights), Config())) == {}
    assert broken(check_dataset(dataset("a", eights), Config())) == {
        "samples": "samples:0: 0 placeholders and 1 items of 'image'"
    }
    assert "the last id is" in broken(check_dataset(dataset("<image>", eights, ends=False), Config()))["samples"]
    few, negative = "samples:0: 1 weights of 2 ids", "samples:0: weights that are none, [-1.0, 1.0]"
    for weights, expected in (([0.5, 1.0], {}), ([1.0], {"samples": few}), ([-1.0, 1.0], {"samples": negative})):
        assert broken(check_dataset(dataset("<image>", eights, weights=weights), Config())) == expected
    counting = dataset("<image>", lambda: iter(range(1000)))
    assert list(broken(check_dataset(counting, Config()))) == ["again"]


def test_settings_without_limits_are_named() -> None:
    """A share that is no number is taken."""
    assert broken(check_settings({}, Config)) == {"limits": "share = nan is taken"}


def test_an_optimizer_that_breaks_a_promise_is_named() -> None:
    """Torch's own SGD makes its momentum at its first step: a checkpoint could not fill it."""
    adamw = discover(OPTIMIZERS).find("adamw", "here")
    spec = attrs.evolve(
        adamw, build=lambda parameters, _config, _meshes: torch.optim.SGD(parameters.values(), lr=0.0, momentum=0.9)
    )
    assert list(broken(check_optimizer(spec, spec.config()))) == ["state", "save and load"]
    still = attrs.evolve(adamw, build=lambda parameters, _config, _meshes: _Still(parameters.values()))
    assert "these are as they were: module.weight" in broken(check_optimizer(still, spec.config()))["steps"]


class _Still(torch.optim.Optimizer):
    """Steps nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class _Brightness(nn.Module):
    """A generator of one number, how bright a picture is."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.read = nn.Linear(hidden, 1)

    def forward(
        self,
        items: Sequence[Mapping[str, Tensor]],
        rows: Tensor,
        spans: Sequence[tuple[int, int]],
        _keys: Tensor,
    ) -> Tensor:
        """Return the square of how far off each picture's is."""
        said = self.read(rows).squeeze(1)
        found = [said[start:stop].sum() - item["mean"] for item, (start, stop) in zip(items, spans, strict=True)]
        return torch.stack(found).float().square() if found else rows.new_zeros(0).float()


def _brightness(**changes: Any) -> GeneratorSpec:
    """Return the spec of one that keeps its promises, with fields changed."""
    whole = GeneratorSpec(
        name="brightness",
        config=NoSettings,
        measure=lambda raw: (raw.height, raw.width),
        targets=lambda _config, _size: 1,
        prepare=lambda _config, raw: {"mean": torch.tensor(raw.convert("L").getextrema()[0] / 255)},
        build=lambda _config, hidden: _Brightness(hidden),
    )
    return attrs.evolve(whole, **changes)


def _looked_at(spec: GeneratorSpec, monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """Return the verdicts of the command on a generator as if it were installed."""
    monkeypatch.setattr(_check, "_kinds_of", lambda _name: [GENERATORS])
    monkeypatch.setattr(_check, "find_installed", lambda _kind, _name, _where: spec)
    return list(_check.check_plugin(spec.name, ()))


def test_a_generator_is_looked_at_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pictures, and what it has not is said."""
    verdicts = _looked_at(_brightness(), monkeypatch)
    assert [str(verdict) for verdict in verdicts if verdict.broken is not None] == []
    assert [verdict.check for verdict in verdicts if verdict.skipped is None] == [
        *("defaults", "limits", "measure", "prepare", "losses", "empty", "independence", "rows", "chance", "gradients"),
        *("initial values", "save and load", "number types"),
    ]


def test_a_generator_that_breaks_a_promise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a wrong number of losses; and what makes no pictures must bring examples of what it makes."""
    two = _brightness(targets=lambda _config, _size: 2)
    assert broken(iter(_looked_at(two, monkeypatch))) == {
        "losses": "of item 0 of size (64, 64) it returned losses of shape (1,) and type torch.float32, expected (2,) "
        "and torch.float32"
    }
    with pytest.raises(
        PluginError,
        match=r"^--check: expected a plugin of images, or one with examples of 'speech', got generator 'brightness' "
        r"without any\. Add to its spec: examples=lambda config: \[item, larger_item\]\.$",
    ):
        _looked_at(_brightness(modality="speech"), monkeypatch)
