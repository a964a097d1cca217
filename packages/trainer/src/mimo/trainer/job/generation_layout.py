"""Which layouts text and items can be generated in; free of torch, so that others are refused before launch."""

from __future__ import annotations

from mimo.hooks import ConfigError
from mimo.model import GeneratorSpec
from mimo.topology import show_ranks
from mimo.trainer.job.job import Job, JobModule


def check_layout(job: Job) -> None:
    """Refuse layouts in which nothing is generated, the same on every rank.

    Raises:
        ConfigError: the language model lies not on all ranks, or is cut by more than ``pp``, ``tp`` and ``ep``, or an
            encoder is not whole, or split by ``tp``, on each rank of the first stage; there is a generator, and that
            stage is not the only one, or the generator doesn't lie so, or makes nothing.
    """
    language = job.language
    first = language.grid.stage_ranks(0)
    on_all = len(language.grid.ranks) == job.world
    _check(job, language, on_all, "a module on each rank that generates, split by pp, tp and ep alone")
    for module in (one for taker in (job.language, *job.generators) for one in job.encoders_of(taker)):
        expected = (
            f"a module on rank {show_ranks(first)} of the language model's first stage, whole or split by tp alone"
        )
        _check(job, module, set(first).issubset(module.grid.ranks) and module.grid.pp == 1, expected)
    for module in job.generators:
        assert isinstance(module.spec, GeneratorSpec), module.name
        if module.spec.generate is None or module.spec.save is None:
            raise ConfigError(
                f"modules.{module.name}.plugin",
                expected="a generator with `generate` and `save`",
                got=f"{module.spec.name!r}, which is trained and makes nothing",
                fix="Add them to its spec.",
            )
        _check(job, language, language.grid.pp == 1, f"pp = 1, as modules.{module.name} makes items of its rows")
        expected = f"a module on rank {show_ranks(first)} of the language model, whole or split by tp alone"
        _check(job, module, set(first).issubset(module.grid.ranks) and module.grid.pp == 1, expected)


def _check(job: Job, module: JobModule, has_place: bool, expected: str) -> None:  # noqa: FBT001 - one of two checks
    parts, grid = len(job.stages_of(module.name)), module.grid
    if has_place and parts == grid.pp and grid.cp == 1 and not module.sequence_parallel:
        return
    raise ConfigError(
        f"modules.{module.name}",
        expected=expected,
        got=f"ranks {list(grid.ranks)} with pp = {grid.pp}, cp = {grid.cp}, "
        f"chunks = {module.chunks}, sequence_parallel = {str(module.sequence_parallel).lower()}",
        fix="Load the checkpoint in another layout.",
    )
