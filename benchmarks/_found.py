"""What a part of a benchmark has measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping

import attrs


@attrs.frozen(kw_only=True)
class Found:
    """Ratios of each round, by what they are.

    Args:
        ratios: as measured.
        aims: what they should be: a relation and a number.
        absent: what could not be measured here, and why.
    """

    ratios: Mapping[str, list[float]] = attrs.field(factory=dict)
    aims: Mapping[str, tuple[str, float]] = attrs.field(factory=dict)
    absent: Mapping[str, str] = attrs.field(factory=dict)


def report(bench: str, parts: Iterable[Found], *, rounds: int) -> None:
    """Print what parts of a benchmark have found, and as the last line one JSON object.

    What is absent has the ratio null, and its reason beside.
    """
    ratios = {what: values for one in parts for what, values in one.ratios.items()}
    aims = {what: aim for one in parts for what, aim in one.aims.items()}
    absent = {what: why for one in parts for what, why in one.absent.items()}
    for what, values in ratios.items():
        shown = f", aim {aims[what][0]} {aims[what][1]}" if what in aims else ""
        print(f"{what}: {statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f}){shown}")
    for what, why in absent.items():
        print(f"{what}: not measured: {why}")
    medians = {what: statistics.median(values) for what, values in ratios.items()}
    result = {
        "bench": bench,
        "ratios": {**medians, **dict.fromkeys(absent)},
        "aims": {what: list(aim) for what, aim in aims.items()},
        "runs": rounds,
        "spread": {what: [min(values), max(values)] for what, values in ratios.items()},
        "absent": absent,
    }
    print(json.dumps(result))
