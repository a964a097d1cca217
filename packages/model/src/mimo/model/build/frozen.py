"""What of a module is frozen: names of parts, and patterns of paths. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from mimo.model.spec import LanguageModelSpec, Lora, ModuleSpec, Stage

Frozen: TypeAlias = frozenset[str] | bool
"""What of a module is not trained: names of its spec's parts, and patterns (`fnmatch`) of paths of its parameters; True
for all of it."""


def named_by_parts(spec: ModuleSpec, *, frozen: Frozen, lora: Lora | None) -> bool:
    """Tell whether what is trained follows from the spec's parts, so that no parameter need be looked at."""
    return lora is None and (isinstance(frozen, bool) or frozen <= spec.parts.keys())


def parts_of(spec: ModuleSpec, config: Any, stage: Stage) -> frozenset[str]:
    """Return the names of the parts that a stage holds."""
    if isinstance(spec, LanguageModelSpec):
        return spec.stage_parts(config, stage)
    found = frozenset(spec.parts) if spec.stages is None else spec.stages.parts(config, stage.pipeline)
    if not stage.seam:
        return found
    assert spec.seam is not None, f"encoder {spec.name!r} has no seam"
    return found & spec.seam.parts if stage.is_projector else found - spec.seam.parts


def is_frozen(spec: ModuleSpec, path: str, frozen: Frozen) -> bool:
    """Tell whether the parameter at ``path`` (without the module's name) lies in a frozen part or matches a pattern."""
    if isinstance(frozen, bool):
        return frozen
    return any(
        is_under(path, spec.parts[entry]) if entry in spec.parts else fnmatchcase(path, entry) for entry in frozen
    )


def is_under(path: str, prefixes: Iterable[str]) -> bool:
    """Tell whether a path is one of the prefixes or lies under one."""
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)
