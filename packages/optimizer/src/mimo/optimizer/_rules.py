"""How single parameters are stepped: by the rule of their module, or of the first pattern that matches their name."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import attrs

from mimo.optimizer._learning_rate import LearningRate
from mimo.optimizer._specs import OptimizerSpec


@attrs.frozen(kw_only=True)
class Rule:
    """How parameters are stepped and clipped.

    Args:
        spec: the plugin whose `OptimizerSpec.build` steps them.
        config: its settings.
        learning_rate: of each step.
        clip_group: parameters of one group, of any module, share one norm by which they are clipped.
    """

    spec: OptimizerSpec = attrs.field(eq=attrgetter("name"))  # no two plugins have one name
    config: Any
    learning_rate: LearningRate
    clip_group: str = ""


@attrs.frozen(kw_only=True)
class Pattern:
    """A rule for those parameters of a module whose name matches.

    Args:
        glob: as `fnmatch.fnmatchcase` reads it: ``*`` is any text, dots included, ``?`` one character, ``[ab]`` one of
            these.
        table: path of the settings that hold it, ``optimizer`` or ``modules.<name>.optimizer``.
        prefix: what stands before the glob: ``<module>.`` if it is of paths inside a module, empty if of full names.
        rule: theirs.
    """

    glob: str
    table: str
    prefix: str = ""
    rule: Rule

    @property
    def where(self) -> str:
        """The path of the setting."""
        return f'{self.table}.patterns."{self.glob}"'

    def matches(self, name: str) -> bool:
        """Return whether a full name ``<module>.<path>`` matches."""
        return fnmatchcase(name, self.prefix + self.glob)


@attrs.frozen(kw_only=True)
class Rules:
    """How the parameters of a module are stepped: the first pattern that matches says, and ``base`` if none does."""

    base: Rule
    patterns: tuple[Pattern, ...] = ()

    def pattern_of(self, name: str) -> Pattern | None:
        """Return the pattern that a parameter follows; None if it follows the module's rule."""
        return next((pattern for pattern in self.patterns if pattern.matches(name)), None)

    def of(self, name: str) -> Rule:
        """Return how the parameter of this full name is stepped."""
        pattern = self.pattern_of(name)
        return self.base if pattern is None else pattern.rule

    def split(self, names: Iterable[str]) -> list[tuple[Rule, tuple[str, ...]]]:
        """Return the rules that these parameters follow, each with its parameters, in their order."""
        found: list[tuple[Rule, list[str]]] = []
        for name in names:
            rule = self.of(name)
            members = next((members for other, members in found if other == rule), None)  # configs may not be hashable
            if members is None:
                found.append((rule, [name]))
            else:
                members.append(name)
        return [(rule, tuple(members)) for rule, members in found]

    @property
    def specs(self) -> tuple[OptimizerSpec, ...]:
        """The plugins that may step parameters of the module, each once, equal on all ranks."""
        rules = (self.base, *(pattern.rule for pattern in self.patterns))
        return tuple({rule.spec.name: rule.spec for rule in rules}.values())

    @property
    def clip_groups(self) -> tuple[str, ...]:
        """The clip groups that parameters of the module may be in, equal on all ranks."""
        return tuple(dict.fromkeys([self.base.clip_group, *(pattern.rule.clip_group for pattern in self.patterns)]))
