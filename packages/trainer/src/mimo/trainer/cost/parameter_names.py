"""The names of a job's parameters, from modules without storage, and what optimizer patterns make of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from mimo.model import Stage
from mimo.model.runtime import attach_lora, build_stage, create_on, trainable_paths
from mimo.optimizer import check_patterns
from mimo.trainer.job.job import Job, JobModule


@attrs.frozen(kw_only=True)
class ParameterName:
    """A parameter of a module, its pieces together: its full name, number of elements, and whether it is trained."""

    name: str
    elements: int
    trained: bool


def names_of(module: JobModule, hidden: int, *, device: str = "meta") -> tuple[ParameterName, ...]:
    """Return the parameters of a module, in order.

    Args:
        module: which.
        hidden: width of the rows that an encoder delivers.
        device: on which it is built; nothing is allocated on the default one.

    Raises:
        RuntimeError, TypeError: some modules read values back while being built, and cannot be built without storage.
    """
    with create_on(device):
        built = build_stage(module.spec, module.config, Stage(), hidden)
    attach_lora(built, module.lora, {})
    trained = trainable_paths(module.spec, built, frozen=module.frozen, lora=module.lora)
    return tuple(
        ParameterName(name=f"{module.name}.{path}", elements=parameter.numel(), trained=path in trained)
        for path, parameter in built.named_parameters()
    )


def check_patterns_of(job: Job, *, computes: bool = True) -> None:
    """Refuse patterns of optimizers that no trained parameter follows. No rank is asked: all know all names.

    Args:
        job: the same on every rank.
        computes: whether this process may compute. One that forks others must not, and leaves it to them to find the
            names of a module that cannot be built without storage.

    Raises:
        ConfigError: by the path of the pattern, with the closest names.
    """
    if not any(module.optimizer.patterns for module in job.modules):
        return
    named: dict[str, tuple[ParameterName, ...]] = {}
    for module in job.modules:
        try:
            named[module.name] = names_of(module, job.row_width(module))
        except (RuntimeError, TypeError):
            if not computes:
                return
            named[module.name] = names_of(module, job.row_width(module), device="cpu")
    check_patterns(
        {module.name: module.optimizer.rules for module in job.modules},
        trained={module: [one.name for one in names if one.trained] for module, names in named.items()},
        frozen={module: [one.name for one in names if not one.trained] for module, names in named.items()},
    )


@attrs.frozen(kw_only=True)
class Followers:
    """How many trained parameters of a module follow a pattern, and their number of elements."""

    parameters: int
    elements: int


def followers(job: Job) -> Iterator[tuple[str, Mapping[str, Followers]]]:
    """Yield for each module that has patterns those that its parameters follow, by path; empty for its own rule."""
    for module in job.modules:
        if module.optimizer.patterns:
            yield module.name, _followers(module, job.row_width(module))


def _followers(module: JobModule, hidden: int) -> Mapping[str, Followers]:
    rules = module.optimizer.rules
    found: dict[str, list[int]] = {}
    for one in names_of(module, hidden):
        if one.trained:
            pattern = rules.pattern_of(one.name)
            found.setdefault("" if pattern is None else pattern.where, []).append(one.elements)
    return {where: Followers(parameters=len(counts), elements=sum(counts)) for where, counts in found.items()}
