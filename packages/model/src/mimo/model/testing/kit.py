"""All checks, and how they are run: each in processes of its own, so that none can disturb another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from mimo.hooks import UserError
from mimo.model.spec import EncoderSpec
from mimo.model.testing import multi_process, single_process
from mimo.model.testing.ranks import run_ranks
from mimo.model.testing.subject import BrokenError, SkippedError, Subject, Verdict

_SKIPPED = "skipped: "


@attrs.frozen
class Check:
    """One promise: a function that raises where a subject breaks it; its docstring is the promise."""

    function: Callable[[Subject], None]
    ranks: int = 1

    @property
    def promise(self) -> str:
        """What an encoder promises."""
        assert self.function.__doc__ is not None
        return self.function.__doc__.rstrip(".")


CHECKS: Mapping[str, Check] = {
    "measure": Check(single_process.check_measure),
    "prepare": Check(single_process.check_prepare),
    "build": Check(single_process.check_build),
    "rows": Check(single_process.check_rows),
    "items": Check(single_process.check_items),
    "empty": Check(single_process.check_empty),
    "independence": Check(single_process.check_alone),
    "memory": Check(single_process.check_memory),
    "chance": Check(single_process.check_chance),
    "gradients": Check(single_process.check_gradients),
    "lanes": Check(single_process.check_lanes),
    "initial values": Check(single_process.check_initial),
    "save and load": Check(single_process.check_saved),
    "number types": Check(single_process.check_types),
    "parts": Check(single_process.check_parts),
    "costs": Check(single_process.check_costs),
    "published weights": Check(single_process.check_published),
    "tensor ranks": Check(multi_process.check_tensor, multi_process.RANKS),
    "sequence parallel": Check(multi_process.check_sequence, multi_process.RANKS),
    "context ranks": Check(multi_process.check_context, multi_process.RANKS),
    "stages": Check(multi_process.check_stages),
    "seam": Check(multi_process.check_seam),
    "recompute": Check(multi_process.check_recompute),
}
"""What is checked, by its short name, in the order in which a beginner should mend it."""

_NEEDED = frozenset({"measure", "prepare", "build", "rows", "items", "empty"})
"""Where one of these is broken, later checks would tell of the same fault in words that lead elsewhere."""


def check_encoder(
    spec: EncoderSpec,
    items: Sequence[Any],
    *,
    config: Any = None,
    hidden: int = 24,
    checks: Iterable[str] = CHECKS,
    seconds: float = 300,
) -> Iterator[Verdict]:
    """Look whether an encoder keeps its promises, and yield a verdict on each.

    Each check runs in forked processes of its own; this process computes nothing with torch.

    Args:
        spec: the encoder.
        items: as a dataset hands them in, at least two, of unlike sizes where the modality has such.
        config: settings, small ones; the defaults if None.
        hidden: width of the rows that it must deliver.
        checks: names of the `CHECKS` to run.
        seconds: how long a check may take.
    """
    if len(items) < 2:  # noqa: PLR2004 - one item shows nothing of what another one does to it
        msg = f"expected at least two items, got {len(items)}"
        raise ValueError(msg)
    subject = Subject(spec=spec, config=spec.config() if config is None else config, hidden=hidden, raw=tuple(items))
    return _judge_all(checks, subject, seconds)


def assert_conforms(
    spec: EncoderSpec,
    items: Sequence[Any],
    *,
    config: Any = None,
    hidden: int = 24,
    checks: Iterable[str] = CHECKS,
    seconds: float = 300,
) -> None:
    """Fail with all verdicts if an encoder breaks a promise; arguments as for `check_encoder`.

    Raises:
        AssertionError: its text is a line for each check.
    """
    verdicts = list(check_encoder(spec, items, config=config, hidden=hidden, checks=checks, seconds=seconds))
    if any(verdict.broken is not None for verdict in verdicts):
        lines = "\n".join(map(str, verdicts))
        msg = f"encoder {spec.name!r} breaks its promises\n{lines}"
        raise AssertionError(msg)


def _judge_all(checks: Iterable[str], subject: Subject, seconds: float) -> Iterator[Verdict]:
    missing: str | None = None
    for name in checks:
        if missing is not None:
            yield Verdict(check=name, promise=CHECKS[name].promise, skipped=f"mend {missing!r} first")
            continue
        verdict = _verdict_of(name, CHECKS[name], subject, seconds)
        if verdict.broken is not None and name in _NEEDED:
            missing = name
        yield verdict


def _verdict_of(name: str, check: Check, subject: Subject, seconds: float) -> Verdict:
    said = [words for words in run_ranks(check.ranks, partial(_look, check, subject), seconds=seconds) if words]
    verdict = Verdict(check=name, promise=check.promise)
    if not said:
        return verdict
    if said[0].startswith(_SKIPPED):
        return attrs.evolve(verdict, skipped=said[0].removeprefix(_SKIPPED))
    return attrs.evolve(verdict, broken=said[0])


def _look(check: Check, subject: Subject) -> str | None:
    try:
        check.function(subject)
    except SkippedError as reason:
        return f"{_SKIPPED}{reason}"
    except (BrokenError, UserError) as how:
        return str(how)
    return None
