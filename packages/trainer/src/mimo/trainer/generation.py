"""Writing on from a prompt, in programs of one's own: names of `mimo.trainer`, under the name that they had before."""

from __future__ import annotations

from mimo.trainer.api.checkpoint import open_checkpoint
from mimo.trainer.decoding.decode import generate
from mimo.trainer.decoding.detokenise import StreamedText
from mimo.trainer.decoding.prompt import Prompt, prompt_of
from mimo.trainer.decoding.sampling import Sampling
from mimo.trainer.step.trainer import Trainer

__all__ = ["Prompt", "Sampling", "StreamedText", "Trainer", "generate", "open_checkpoint", "prompt_of"]
