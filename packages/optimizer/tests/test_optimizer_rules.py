"""Which rule a parameter follows, and patterns that none follows."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from mimo.hooks import ConfigError
from mimo.optimizer import LearningRate, Pattern, Rule, Rules, check_patterns
from mimo.optimizer._adamw import LocalAdamWConfig, mimo_register_optimizers

(ADAMW,) = mimo_register_optimizers()
BASE = Rule(spec=ADAMW, config=LocalAdamWConfig(), learning_rate=LearningRate(lr=1.0))
NAMES = ("vision.patch.weight", "vision.layers.0.norm.weight", "vision.layers.11.norm.weight", "vision.Head.weight")


def rule(lr: float, **more: Any) -> Rule:
    """Return a rule with another learning rate."""
    return attrs.evolve(BASE, learning_rate=LearningRate(lr=lr), **more)


def own(glob: str, lr: float = 2.0, **more: Any) -> Pattern:
    """Return a pattern of the module's own table."""
    return Pattern(glob=glob, table="modules.vision.optimizer", prefix="vision.", rule=rule(lr, **more))


def of_all(glob: str, lr: float = 3.0, **more: Any) -> Pattern:
    """Return a pattern of the table of all modules."""
    return Pattern(glob=glob, table="optimizer", rule=rule(lr, **more))


@pytest.mark.parametrize(
    ("patterns", "rates"),
    [
        ([], [1, 1, 1, 1]),
        ([own("*norm*")], [1, 2, 2, 1]),
        ([own("norm*")], [1, 1, 1, 1]),
        ([own("*norm*", 5), own("layers.0.*", 6)], [1, 5, 5, 1]),
        ([own("layers.0.*", 6), own("*norm*", 5)], [1, 6, 5, 1]),
        ([own("layers.?.*")], [1, 2, 1, 1]),
        ([own("layers.1[01].*")], [1, 1, 2, 1]),
        ([own("head.*"), of_all("vision.*.weight")], [3, 3, 3, 3]),
        ([of_all("*.Head.*")], [1, 1, 1, 3]),
        ([of_all("language.*")], [1, 1, 1, 1]),
    ],
)
def test_optimizer_rules_first_pattern_that_matches_says(patterns: list[Pattern], rates: list[float]) -> None:
    """Globs are of the whole path, dots included, and mind the case."""
    rules = Rules(base=BASE, patterns=tuple(patterns))
    assert [rules.of(name).learning_rate.lr for name in NAMES] == rates


def test_optimizer_rules_are_split_by_what_they_say() -> None:
    """Patterns that say the same make one set, wherever they were written."""
    same = attrs.evolve(rule(2.0), learning_rate=LearningRate(lr=2.0, where="elsewhere"))
    rules = Rules(
        base=BASE,
        patterns=(own("patch.*"), Pattern(glob="*.Head.*", table="optimizer", rule=same), own("layers.0.*", 4.0)),
    )
    found = {found.learning_rate.lr: names for found, names in rules.split(NAMES)}
    assert found == {2.0: (NAMES[0], NAMES[3]), 4.0: (NAMES[1],), 1.0: (NAMES[2],)}


def test_optimizer_rules_name_their_clip_groups_once() -> None:
    """All that any parameter of the module may be in, so that ranks with other parameters know them too."""
    rules = Rules(base=BASE, patterns=(own("a", clip_group="x"), own("b"), own("c", clip_group="x")))
    assert rules.clip_groups == ("", "x")


TRAINED = {"vision": NAMES, "language": ("language.embedding.weight", "language.layers.0.attention.query.weight")}
FROZEN = {"vision": ("vision.projector.bias",), "language": ()}


def refused(vision: list[Pattern], language: list[Pattern]) -> str:
    """Return why patterns are refused, empty if they are not."""
    rules = {
        "vision": Rules(base=BASE, patterns=tuple(vision)),
        "language": Rules(base=BASE, patterns=tuple(language)),
    }
    try:
        check_patterns(rules, trained=TRAINED, frozen=FROZEN)
    except ConfigError as error:
        return str(error)
    return ""


def test_optimizer_patterns_that_something_follows_are_accepted() -> None:
    """One of all modules need only be followed in one of them; a module's own patterns may leave it nothing to do."""
    shared = of_all("*.norm.*")
    assert refused([shared], [shared]) == ""
    assert refused([own("layers.*"), shared], [shared]) == ""
    assert refused([own("layers.0.*"), own("layers.*")], []) == ""


@pytest.mark.parametrize(
    ("vision", "language", "where", "text"),
    [
        (
            [own("*.nrom.*")],
            [],
            'modules.vision.optimizer.patterns."*.nrom.*"',
            "trained parameters of vision, by their path inside it, got one that matches none. The closest are layers",
        ),
        (
            [own("vision.patch.*")],
            [],
            'modules.vision.optimizer.patterns."vision.patch.*"',
            "trained parameters of vision, by their path inside it, got one that matches none. The closest are patch",
        ),
        (
            [of_all("*.atention.*")],
            [of_all("*.atention.*")],
            'optimizer.patterns."*.atention.*"',
            "trained parameters, got one that matches none. The closest are language.layers.0.attention.query.weight, ",
        ),
        (
            [own("projector.*")],
            [],
            'modules.vision.optimizer.patterns."projector.*"',
            "trained parameters of vision, by their path inside it, got one that matches frozen parameters alone. ",
        ),
    ],
)
def test_optimizer_patterns_that_nothing_follows_are_refused(
    vision: list[Pattern], language: list[Pattern], where: str, text: str
) -> None:
    """By their path, with the closest names."""
    assert refused(vision, language).startswith(f"{where}: expected a pattern that matches {text}")


def test_optimizer_patterns_after_one_that_takes_all_are_refused() -> None:
    """The other pattern is named."""
    assert refused([own("*.weight"), own("patch.*")], []) == (
        'modules.vision.optimizer.patterns."patch.*": expected a trained parameter that matches it and none of the '
        'patterns before it, got only such as match "*.weight". Put it before that one, or remove it.'
    )
    partly = refused([own("layers.0.*"), of_all("vision.*"), of_all("*.layers.*")], [])
    assert partly.startswith('optimizer.patterns."*.layers.*": ')
    assert partly.endswith('got only such as match "vision.*". Put it before that one, or remove it.')


def test_optimizer_patterns_of_layers_are_refused_with_the_name_of_one_layer() -> None:
    """Of names that differ in numbers alone, the message has one."""
    names = {"vision": [f"vision.layers.{layer}.norm.weight" for layer in range(9)] + ["vision.patch.weight"]}
    with pytest.raises(ConfigError, match=r"The closest are layers\.0\.norm\.weight, patch\.weight\.$"):
        check_patterns({"vision": Rules(base=BASE, patterns=(own("*.mron.*"),))}, trained=names, frozen={"vision": ()})
