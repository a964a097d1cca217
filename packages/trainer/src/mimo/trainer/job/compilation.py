"""What ``run.compile`` compiles of each module of a job, and with what."""

from __future__ import annotations

from collections.abc import Mapping

from mimo.hooks import ConfigError
from mimo.model import Stage
from mimo.model.runtime import Compilation, compilation_of, stage_without_storage
from mimo.trainer.config.settings import RunSettings
from mimo.trainer.job.job import Job


def compile_backend(run: RunSettings) -> str:
    """Return the backend of ``torch.compile`` that layers are compiled with; empty if they aren't."""
    return run.compile_backend if run.compile else ""


def compilations(job: Job) -> Mapping[str, Compilation]:
    """Return what of each module is compiled, by name; nothing where the run compiles none.

    Raises:
        ConfigError: it is to compile, and no module has what can be.
    """
    if not job.settings.run.compile:
        return {}
    found = {
        module.name: compilation_of(
            module.spec,
            stage_without_storage(module.spec, module.config, Stage(), job.row_width(module), module.lora),
            name=module.name,
        )
        for module in job.modules
    }
    if not any(one.layers for one in found.values()):
        raise ConfigError(
            "run.compile",
            expected="a module with layers that can be compiled",
            got="; ".join(f"{name} stays eager, as {one.eager['']}" for name, one in found.items()),
            fix="Set it to false.",
        )
    return found
