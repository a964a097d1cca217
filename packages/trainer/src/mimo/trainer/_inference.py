"""What a checkpoint is used for: evaluation in any layout, and writing by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from mimo.checkpoint import load
from mimo.data import Tokenizer, pack
from mimo.hooks import ConfigError, EvaluationInfo, ItemInfo
from mimo.model import EncoderSpec
from mimo.trainer._engine import Engine
from mimo.trainer._place import Place
from mimo.trainer._precision import compute_dtype
from mimo.trainer._programs import language_batch, on_device, take_rows
from mimo.trainer._resolved import Job


def load_model(job: Job, place: Place, checkpoint: Path) -> Engine:
    """Assemble this rank and load the weights, and nothing else, of a step folder."""
    place.progress.enter("loading the weights")
    engine = Engine(job, rank=place.rank, device=torch.device(place.device), progress=place.progress)
    load(checkpoint, engine.model_state())
    place.progress.enter("")
    return engine


def evaluate(job: Job, place: Place, checkpoint: Path, step: int) -> EvaluationInfo | None:
    """Evaluate a step folder's weights on the held-out samples; None where the data has none."""
    engine = load_model(job, place, checkpoint)
    place.progress.enter("evaluation")
    return engine.evaluate(step)


@attrs.frozen(kw_only=True)
class Prompt:
    """One unfinished sample: a text with placeholders, and raw items for them by modality; a `mimo.data.Dataset`."""

    tokenizer: Tokenizer
    text: str
    items: Sequence[tuple[ItemInfo, Any]]

    def __len__(self) -> int:
        """Return 1."""
        return 1

    def tokens(self, _sample: int) -> Sequence[int]:
        """Return the text's ids, open at the end."""
        try:
            return self.tokenizer.encode(self.text)
        except ValueError as error:
            raise ConfigError("--text", expected="text that the tokenizer can write", got=str(error)) from error

    def infos(self, _sample: int) -> Sequence[ItemInfo]:
        """Return the items."""
        return [info for info, _ in self.items]

    def raw(self, _sample: int, index: int) -> Any:
        """Return an item."""
        return self.items[index][1]

    def where(self, _sample: int) -> str:
        """Name the prompt in messages."""
        return "the prompt"


def prompt_of(job: Job, text: str, raws: Sequence[Any], modality: str = "image") -> Prompt:
    """Return a prompt of ``text`` and raw items of one modality; an empty text is one placeholder for each item.

    Raises:
        ConfigError: no encoder reads the modality.
    """
    encoder = next((module for module in job.encoders if module.modality == modality), None)
    if raws and encoder is None:
        raise ConfigError(f"--{modality}", expected="a model that reads it", got=f"no encoder of {modality!r}")
    items = []
    for index, raw in enumerate(raws):
        assert encoder is not None
        assert isinstance(encoder.spec, EncoderSpec)
        info = ItemInfo(sample=0, index=index, modality=modality, size=encoder.spec.measure(raw))
        items.append((info, raw))
    return Prompt(tokenizer=job.tokenizer, text=text or f"<{modality}>" * len(items), items=items)


@torch.no_grad()
def generate(engine: Engine, prompt: Prompt, *, max_tokens: int, told: Callable[[int], None] = lambda _id: None) -> str:
    """Write on from ``prompt``, each time the likeliest token, until the end or ``max_tokens``.

    Args:
        engine: of one process without parallelism.
        prompt: what to go on from.
        max_tokens: most tokens to write.
        told: is told each id as it is written.
    """
    job = engine.job
    layout = job.lay_out(prompt, 0)
    if layout.truncated or not len(layout.tokens):
        raise ConfigError(
            "the prompt",
            expected=f"1 to data.max_tokens = {job.settings.data.max_tokens} tokens, image rows included",
            got="none" if not len(layout.tokens) else "more",
        )
    engine.optimizer.gather()
    encoded = {}
    for module in job.encoders:
        assert isinstance(module.spec, EncoderSpec)
        items = [item for item in layout.items if item.info.modality == module.modality]
        prepared = [module.spec.prepare(module.config, prompt.raw(0, item.info.index)) for item in items]
        given = [on_device(item, job, engine.device) for item in prepared]
        (part,) = engine.model.parts_of(module.name)
        found = part.encode(given, [item.info.size for item in items])
        encoded[module.name] = take_rows(job, module, items, found).to(compute_dtype(job.settings.run.precision))
    (part,) = engine.model.parts_of(job.language.name)
    language = part.language
    written: list[int] = []
    for _ in range(max_tokens):
        tokens = np.concatenate([layout.tokens, np.asarray(written, dtype=np.int64)])
        packed = pack([attrs.evolve(layout, tokens=tokens, labels=np.full(len(tokens), -100, dtype=np.int64))])
        hidden = language(language_batch(packed, job, engine.device), encoded, None)
        following = int(language.greedy(hidden)[-1])
        if following == job.tokenizer.end:
            break
        written.append(following)
        told(following)
    return job.tokenizer.decode(written)
