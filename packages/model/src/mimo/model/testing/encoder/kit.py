"""All checks of an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mimo.model.spec import EncoderSpec
from mimo.model.testing import modules
from mimo.model.testing.checks import Check, Checks, Verdict, assert_kept
from mimo.model.testing.encoder import multi_process, single_process
from mimo.model.testing.encoder.subject import Subject

CHECKS: Mapping[str, Check] = {
    "measure": Check(single_process.check_measure),
    "prepare": Check(single_process.check_prepare),
    "build": Check(single_process.check_build),
    "rows": Check(single_process.check_rows),
    "items": Check(single_process.check_items),
    "empty": Check(single_process.check_empty),
    "independence": Check(single_process.check_alone),
    "memory": Check(single_process.check_memory),
    "chance": Check(modules.check_chance),
    "gradients": Check(modules.check_gradients),
    "lanes": Check(single_process.check_lanes),
    "initial values": Check(modules.check_initial),
    "save and load": Check(modules.check_saved),
    "number types": Check(single_process.check_types),
    "parts": Check(single_process.check_parts),
    "costs": Check(single_process.check_costs),
    "published weights": Check(modules.check_published),
    "tensor ranks": Check(multi_process.check_tensor, multi_process.RANKS),
    "sequence parallel": Check(multi_process.check_sequence, multi_process.RANKS),
    "context ranks": Check(multi_process.check_context, multi_process.RANKS),
    "stages": Check(multi_process.check_stages),
    "seam": Check(multi_process.check_seam),
    "recompute": Check(multi_process.check_recompute),
}
"""What is checked, by its short name, in the order in which a beginner should mend it."""

_NEEDED = frozenset({"measure", "prepare", "build", "rows", "items", "empty"})
"""What all other checks rely on."""


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
    return Checks(by_name=CHECKS, needed=_NEEDED).look(subject, checks, seconds=seconds)


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
    verdicts = check_encoder(spec, items, config=config, hidden=hidden, checks=checks, seconds=seconds)
    assert_kept(f"encoder {spec.name!r}", verdicts)
