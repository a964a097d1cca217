"""Training from Python: settings become a `Job`, which `train` runs in fresh processes and a `Trainer` step by step.

Each name is imported when it is first used, so that ``import mimo.trainer`` costs nothing and `mimo --help` answers at
once: settings and jobs need no torch, trainers do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mimo.trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from mimo.trainer.api.checkpoint import open_checkpoint
    from mimo.trainer.api.outcome import RunFailedError
    from mimo.trainer.api.runs import TrainResult, evaluate, train
    from mimo.trainer.config.settings import Settings
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.decoding.decode import generate, generate_many
    from mimo.trainer.decoding.prompt import Prompt, prompt_of
    from mimo.trainer.decoding.running import Answer
    from mimo.trainer.decoding.sampling import Sampling
    from mimo.trainer.job.job import Job
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.step.trainer import Trainer
else:  # a test compares the two
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Answer": "decoding.running",
            "Job": "job.job",
            "Prompt": "decoding.prompt",
            "RunFailedError": "api.outcome",
            "Sampling": "decoding.sampling",
            "Settings": "config.settings",
            "TrainResult": "api.runs",
            "Trainer": "step.trainer",
            "evaluate": "api.runs",
            "generate": "decoding.decode",
            "generate_many": "decoding.decode",
            "open_checkpoint": "api.checkpoint",
            "prompt_of": "decoding.prompt",
            "read_settings": "config.toml",
            "resolve": "resolving.resolve",
            "train": "api.runs",
        },
    )

__all__ = [
    "Answer",
    "Job",
    "Prompt",
    "RunFailedError",
    "Sampling",
    "Settings",
    "TrainResult",
    "Trainer",
    "evaluate",
    "generate",
    "generate_many",
    "open_checkpoint",
    "prompt_of",
    "read_settings",
    "resolve",
    "train",
]
