"""Which parallel axes a plugin's module has at all, as its spec says. Free of torch."""

from __future__ import annotations

from mimo.model.spec.specs import LanguageModelSpec, ModuleSpec

PARALLEL_AXES = ("tp", "sequence_parallel", "cp", "pp", "ep", "etp")
"""The axes of a module's settings beside lanes (dp), which all have."""


def supported_axes(spec: ModuleSpec) -> tuple[str, ...]:
    """Return the `PARALLEL_AXES` that a plugin supports; some of its configs may refuse them all the same."""
    has_experts = isinstance(spec, LanguageModelSpec) and spec.experts is not None
    has = {
        "tp": spec.tensor is not None,
        "sequence_parallel": spec.tensor is not None and spec.tensor.splits_rows,
        "cp": spec.context is not None,
        "pp": isinstance(spec, LanguageModelSpec) or spec.stages is not None,
        "ep": has_experts,
        "etp": has_experts,
    }
    return tuple(axis for axis in PARALLEL_AXES if has[axis])
