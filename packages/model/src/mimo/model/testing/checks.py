"""Promises of a plugin, and how they are looked at: each in processes of its own, so that none can disturb another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs

from mimo.hooks import UserError
from mimo.model.testing.ranks import run_ranks

_SKIPPED = "skipped: "


@attrs.frozen(kw_only=True)
class Verdict:
    """What the kit says of one promise.

    Args:
        check: its short name.
        promise: what a plugin promises.
        broken: how it is broken; None where it holds or was not checked.
        skipped: why it was not looked at; None where it was.
    """

    check: str
    promise: str
    broken: str | None = None
    skipped: str | None = None

    def __str__(self) -> str:
        """Return it as a line, with what was found below it."""
        if self.skipped is not None:
            return f"-  {self.check}: {self.promise} (not looked at: {self.skipped})"
        if self.broken is None:
            return f"ok {self.check}: {self.promise}"
        return f"NO {self.check}: {self.promise}\n   {self.broken}"


class BrokenError(AssertionError):
    """A promise is broken; its text says how."""


class SkippedError(Exception):
    """A promise can't be looked at; its text says why."""


@attrs.frozen
class Check:
    """One promise: a function that raises where a subject breaks it; its docstring is the promise."""

    function: Callable[[Any], None]
    ranks: int = 1

    @property
    def promise(self) -> str:
        """What a plugin promises."""
        assert self.function.__doc__ is not None
        return self.function.__doc__.rstrip(".")


@attrs.frozen(kw_only=True)
class Checks:
    """All promises of a kind of plugin.

    Args:
        by_name: each by its short name, in the order in which a beginner should mend it.
        needed: where one of these is broken, later checks would report the same fault in words that lead elsewhere.
    """

    by_name: Mapping[str, Check]
    needed: Collection[str]

    def look(self, subject: Any, names: Iterable[str], *, seconds: float) -> Iterator[Verdict]:
        """Yield a verdict on each named promise of a subject; a check may take so many seconds."""
        missing: str | None = None
        for name in names:
            check = self.by_name[name]
            if missing is not None:
                yield Verdict(check=name, promise=check.promise, skipped=f"mend {missing!r} first")
                continue
            verdict = _verdict_of(name, check, subject, seconds)
            if verdict.broken is not None and name in self.needed:
                missing = name
            yield verdict


def assert_kept(what: str, verdicts: Iterable[Verdict]) -> None:
    """Fail with all verdicts if a promise is broken.

    Raises:
        AssertionError: its text is a line for each check.
    """
    verdicts = list(verdicts)
    if any(verdict.broken is not None for verdict in verdicts):
        lines = "\n".join(map(str, verdicts))
        msg = f"{what} breaks its promises\n{lines}"
        raise AssertionError(msg)


def _verdict_of(name: str, check: Check, subject: Any, seconds: float) -> Verdict:
    said = [words for words in run_ranks(check.ranks, partial(_look, check, subject), seconds=seconds) if words]
    verdict = Verdict(check=name, promise=check.promise)
    if not said:
        return verdict
    if said[0].startswith(_SKIPPED):
        return attrs.evolve(verdict, skipped=said[0].removeprefix(_SKIPPED))
    return attrs.evolve(verdict, broken=said[0])


def _look(check: Check, subject: Any) -> str | None:
    try:
        check.function(subject)
    except SkippedError as reason:
        return f"{_SKIPPED}{reason}"
    except (BrokenError, UserError) as how:
        return str(how)
    return None
