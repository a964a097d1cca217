"""Which tests a slice of `day.py` has: the most important first, each with the bound by which it is judged."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs


@attrs.frozen(kw_only=True)
class DayTest:
    """One test: a program beside this file, see `_case.run`.

    Args:
        name: unique in all slices.
        program: file name.
        words: arguments of its own.
        bound: what its figures are held to, in words.
        seconds: after which it is ended.
    """

    name: str
    program: str
    words: tuple[str, ...] = ()
    bound: str
    seconds: float = 120.0


_LAW = (
    "first loss to 1e-6 of itself; each gradient to 1e-5 max(|g|, 1e-3 |all|), each weight after 3 steps to "
    "1e-5 max(|w|, 3 lr sqrt(n)), or 5 times what weights that begin as the next numbers change of it"
)
_DOUBLE = "in float64, the same with 1e-12 for the loss and 1e-11 for gradients and weights"
_NEAR = (
    "50 steps: mean over steps of |loss / loss in fp32 - 1| at most 0.01, the worst at most 0.05; "
    "held-out loss to 0.02; both learn; no step is skipped; weights and moments stay fp32"
)


def _families(dtype: str, bound: str) -> tuple[DayTest, ...]:
    return tuple(
        DayTest(
            name=f"{dtype} {group}",
            program="_families.py",
            words=("--group", group, "--dtype", dtype),
            bound=bound,
        )
        for group in ("decoders", "encoders", "hybrids")
    )


SLICES: Mapping[str, tuple[DayTest, ...]] = MappingProxyType(
    {
        "1": (
            DayTest(
                name="digits",
                program="_digits.py",
                bound="first loss to 1e-5 of the CPU's, the next nine to 1e-3; "
                "held-out images right: both at least 0.9, apart by at most 0.05",
                seconds=240.0,
            ),
            *_families("fp32", _LAW),
            DayTest(name="bf16", program="_precisions.py", words=("--precision", "bf16"), bound=_NEAR),
            DayTest(name="fp16", program="_precisions.py", words=("--precision", "fp16"), bound=_NEAR),
            DayTest(
                name="synchronisations",
                program="_census.py",
                bound="one that the test makes itself is found, by its own line; each of a step has a file and line",
            ),
            DayTest(
                name="items sent",
                program="_sent_items.py",
                bound="what a thread has copied while the device computes is there bit by bit; at least one step is "
                "sent whole, and each loss is that of a run that moves each item alone, to 1e-5",
            ),
            *_families("fp64", _DOUBLE),
        ),
        "2": (
            *(
                DayTest(
                    name=f"{world} ranks",
                    program="_layouts.py",
                    words=("--world", str(world)),
                    bound=_LAW,
                    seconds=150.0,
                )
                for world in (2, 4, 8, 3, 5, 6)
            ),
            *(
                DayTest(
                    name=f"a rank that {how}",
                    program="_faults.py",
                    words=("--how", how),
                    bound="all ranks end, with code 3, in 60 s; the last line names the rank and why; nobody is left; "
                    "a killed run resumes, and its last loss is that of a run without a fault to 1e-5",
                    seconds=150.0,
                )
                for how in ("is-killed", "sleeps", "is-stopped")
            ),
        ),
    }
)
