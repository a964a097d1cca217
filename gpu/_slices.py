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
        without: variables of the environment that it does without.
    """

    name: str
    program: str
    words: tuple[str, ...] = ()
    bound: str
    seconds: float = 120.0
    without: tuple[str, ...] = ()


_LAW = (
    "first loss to 1e-6 of itself; each gradient to 1e-5 max(|g|, 1e-3 |all|), each weight after 3 steps to "
    "1e-5 max(|w|, 3 lr sqrt(n)), or 5 times what weights that begin as the next numbers change of it"
)
_DOUBLE = "in float64, the same with 1e-12 for the loss and 1e-11 for gradients and weights"
_NEAR = (
    "50 steps: mean over steps of |loss / loss in fp32 - 1| at most 0.01, the worst at most 0.05; "
    "held-out loss to 0.02; both learn; no step is skipped; weights and moments stay fp32"
)


_ROUNDING = (
    "each row, as a share of its norm or the mean row's if that is larger, to 4 roundings of its kind of number in "
    "bf16 and fp16, 32 in fp32 and fp64; rows of gradients to twice as many"
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


_EAGER, _COMPILED = "; memory to 0.1 of the estimate", "; memory at most 1.1 of the estimate"
_BOTH = f", and compiled as many as not compiled, or more{_EAGER}, compiled at most 1.1"


def _throughput(name: str, model: str, *words: str, bound: str) -> DayTest:
    return DayTest(
        name=name,
        program="_throughput.py",
        words=("--model", model, *words),
        bound="all ways read the same samples, and each loss is that of equal chances to 0.3; on a GPU: ours has as "
        f"many rows a second as transformers or more{bound}; no kernel runs in less than 0.15 of the time",
        seconds=160.0,
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
                name="TF32",
                program="_precisions.py",
                words=("--precision", "tf32"),
                bound=f"{_NEAR}; on a GPU: products with it are off by more than 1e-5 of themselves, without by less",
                without=("NVIDIA_TF32_OVERRIDE",),
            ),
            DayTest(
                name="traces and profiles",
                program="_traced.py",
                bound="a bar for each action of the plan, in its order, within the step; each action in the profile; "
                "on a GPU: kernels in it, which take at most twice as long as the bars of another step",
                seconds=90.0,
            ),
            DayTest(
                name="synchronisations",
                program="_census.py",
                bound="one that the test makes itself is found, by its own line; each of a step has a file and line; "
                "on a GPU at most three a step, and one for each microbatch and layer of experts",
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
        "3": (
            DayTest(
                name="attention",
                program="_attention.py",
                bound=f"{_ROUNDING}; two kernels of a form differ by twice as much at most",
            ),
            DayTest(
                name="rates of attention",
                program="_attention_rates.py",
                bound="on a GPU: forward and backward of attend each take at most 1.2 times as long as the bare kernel",
            ),
            DayTest(
                name="experts",
                program="_experts.py",
                bound=f"{_ROUNDING}; on a GPU: forward and backward each at least 0.6 of the rate of a dense product",
            ),
            DayTest(
                name="costs of calls",
                program="_call_costs.py",
                bound="on a GPU: a pair, a call and a row cost something; what they cost is for the table",
            ),
        ),
        "4": (
            DayTest(
                name="optimizer on the host",
                program="_offload.py",
                bound="each loss to 0.01 of that with all on the device; on a GPU: at least 0.8 of the time of copies "
                "is beside computation; bytes saved to 0.1 of what is estimated",
                seconds=180.0,
            ),
            DayTest(
                name="checkpoint",
                program="_checkpoint.py",
                bound="what is read back has the same bits as what was saved: weights and two moments, 12 GB at least; "
                "on a GPU: the first save stalls training for less than 10 s, one after it for less than 1 s",
                seconds=240.0,
            ),
            DayTest(
                name="no memory left",
                program="_no_memory.py",
                bound="the message says where it was, what was estimated and what would have fitted; on a GPU: the "
                "snapshot that it names has at least the weights, and at most what was left",
                seconds=100.0,
            ),
        ),
        "5": (
            _throughput("1B decoder", "text", bound=_EAGER),
            _throughput("ViT-L and 1B decoder", "pictures", bound=_EAGER),
            DayTest(
                name="the same bits each time",
                program="_repeated.py",
                bound="two runs of each model: the same losses, norms, weights and moments to the bit",
                seconds=150.0,
            ),
        ),
        "6": (
            _throughput("1B decoder, compiled", "text", "--compiled", "all", bound=_COMPILED),
            _throughput("ViT-L and 1B decoder, compiled", "pictures", "--compiled", "all", bound=_COMPILED),
            _throughput("1B hf-decoder", "text", "--decoder", "hf-decoder", "--compiled", "ours-too", bound=_BOTH),
        ),
    }
)
