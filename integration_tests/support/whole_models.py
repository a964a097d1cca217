"""Published folders of shrunk whole image-text models as the library writes them, with tokenizer and chat template."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import torch
import transformers
from oracle import Outcome, Piece, compare
from PIL import Image
from published_folder import Folder
from published_images import FOLDERS
from resuming import begin
from safetensors.torch import load_file
from tables import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from mimo.data import SampleLayout
from mimo.trainer import Job, Trainer

END = "<|im_end|>"
_STIR = 0.05
_TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_IMAGE_TOKENS = ("image_token_id", "image_token_index")


def deep_layers(name: str) -> int:
    """Return how many first layers of the language model in one of `FOLDERS` add rows of images."""
    return len(FOLDERS[name].config["vision_config"].get("deepstack_visual_indexes", ()))


def layers_of(name: str) -> int:
    """Return how many layers the language model in one of `FOLDERS` has.

    It is one more than add rows of images, so that half of them end inside these, and rows ride to the second stage.
    """
    return int(FOLDERS[name].config["text_config"]["num_hidden_layers"])


def write_whole(name: str, path: Path, *, seed: int = 0, stir: float = _STIR, **text: Any) -> Any:
    """Write a folder, and return the library's model that is in it.

    Args:
        name: of one of `FOLDERS`.
        path: the new folder.
        seed: of its weights.
        stir: how far they are moved off what the library draws, embeddings apart; far, and what is generated depends on
            all of a prompt, not on its last token alone.
        text: keys of its language model.
    """
    folder = FOLDERS[name]
    path.mkdir(parents=True)
    tokenizer = _tokenizer(folder)
    model = new_whole(folder, tokenizer, seed=seed, stir=stir, **text)
    save(model, path)
    tokenizer.save(str(path / "tokenizer.json"))
    images = folder.processing()
    template = _TEMPLATE.replace("MARKER", images.marker)
    files = {
        "tokenizer_config.json": {"eos_token": END, "chat_template": template},
        "preprocessor_config.json": folder.preprocessor,
        "processor_config.json": folder.processor,
    }
    for file, said in files.items():
        if said:
            (path / file).write_text(json.dumps(said))
    return model


def load(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """Return the library's model in a folder, and what of the folder didn't fit."""
    described = json.loads((path / "config.json").read_text())
    made = getattr(transformers, described["architectures"][0])
    with contextlib.redirect_stderr(io.StringIO()):
        model, loading = made.from_pretrained(path, output_loading_info=True)
    return model.float().eval(), loading


def save(model: Any, path: Path) -> None:
    """Write a model of the library without a bar of its progress."""
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(path)


def write_conversations(path: Path, count: int = 8) -> Path:
    """Write ragged conversations with no image, one, or two of unlike sizes; return the file."""
    draw = random.Random(0)
    path.mkdir(exist_ok=True)
    sizes = [(40, 30), (90, 20), (28, 28), (64, 60), (20, 90)]
    for number, size in enumerate(sizes):
        Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(path / f"{number}.png")
    lines = []
    for sample in range(count):
        images = [{"type": "image", "image": f"{draw.randrange(len(sizes))}.png"} for _ in range(sample % 3)]
        asked = [*images[:1], {"type": "text", "text": "what" * draw.randint(1, 4)}, *images[1:]]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "so " * draw.randint(1, 6)}]
        lines.append(json.dumps({"messages": turns}))
    file = path / "train.jsonl"
    file.write_text("\n".join(lines))
    return file


def library_inputs(model: Any, job: Job, layout: SampleLayout, images: Sequence[Any]) -> dict[str, Any]:
    """Return what the library's model takes of a sample.

    Args:
        model: of the library.
        job: whose encoder prepares images.
        layout: of the sample.
        images: of it, in order.
    """
    ids = torch.from_numpy(layout.tokens)[None]
    is_row = torch.zeros_like(ids)
    for item in layout.items:
        for start, stop in item.runs:
            is_row[:, start:stop] = 1
    takes = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"input_ids": ids}
    given |= {key: is_row for key in ("mm_token_type_ids", "token_type_ids") if key in takes}
    if images:
        (encoder,) = job.encoders
        processing = encoder.config.processing
        sizes = [(image.height, image.width) for image in images]
        given |= processing.collate([processing.prepare(image) for image in images], sizes)
    return given


def library_step(model: Any, job: Job) -> tuple[float, Sequence[torch.Tensor], Any]:
    """Return the loss of all training samples, each by itself, by the library's model, and it with its gradients.

    Between them are the logits [S, V] of each sample.

    Args:
        model: of the library; its parameters become their gradients.
        job: whose layouts of samples, and images, it sees.
    """
    assert job.train is not None
    parts: list[torch.Tensor] = []
    every: list[torch.Tensor] = []
    total = 0.0
    for sample in range(len(job.train)):
        layout = job.lay_out(job.train, sample)
        weights = torch.from_numpy(layout.targets.astype(np.float32) if layout.weights is None else layout.weights)
        given = library_inputs(model, job, layout, [job.train.raw(sample, item.info.index) for item in layout.items])
        ids = given["input_ids"]
        logits = model(**given).logits[0]
        every.append(logits.detach())
        nll = functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        parts.append((nll * weights[:-1]).sum())
        total += float(weights.sum())
    loss = torch.stack(parts).sum() / total
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return loss.item(), every, model


@attrs.frozen(eq=False)
class SampleLogits:
    """Logits of a sample that a rank's losses are of.

    Args:
        sample: its number.
        positions: [S] of rows in it.
        rows: [S, V] theirs.
    """

    sample: int
    positions: torch.Tensor
    rows: torch.Tensor


def tune(rank: int, settings: Table) -> tuple[Outcome, list[SampleLogits]]:
    """Train one step on this rank from what settings load, and return its loss and gradients, and what these are of."""
    trainer, _, _ = begin(rank, settings)
    found, vocabulary = list[SampleLogits](), trainer.job.tokenizer.vocabulary
    language: Any = next((one for one in trainer.programs if one.module.name == trainer.job.language.name), None)
    if language is None:
        return _step(trainer), found
    read = type(language)._read

    def record(program: Any, given: Any, hidden: torch.Tensor) -> Any:
        with torch.no_grad():
            rows = program.logits(hidden)[:, :vocabulary]
        layouts = given.step.lane_layouts(program.module, program.place.dp)
        assert len(rows) == len(given.packed.samples)
        for number, layout in enumerate(layouts):
            own = given.packed.samples == number
            positions = torch.from_numpy(given.packed.positions[own])
            found.append(SampleLogits(layout.sample, positions, rows[torch.from_numpy(own)]))
        return read(program, given, hidden)

    with patch.object(type(language), "_read", record):
        return _step(trainer), found


def _step(trainer: Trainer) -> Outcome:
    stats = trainer.accumulate(1)
    summed = {
        name: Piece.of(value.grad)
        for module in trainer.optimizer.modules.values()
        for name, value in module.part.parameters.items()
        if value.grad is not None
    }
    stepped = trainer.update(1, stats)
    divisor = stepped.agreed.divisor
    gradients = {name: attrs.evolve(piece, values=piece.values / divisor) for name, piece in summed.items()}
    return Outcome(losses=[stepped.loss], terms={}, norms=[stepped.norm], gradients=gradients, weights={})


def gradient_differences(
    loss: float, gradients: Mapping[str, torch.Tensor], outcomes: Sequence[Outcome], *, bound: float = 1e-5
) -> list[str]:
    """Return how a step differs from the library's, by the first law.

    Args:
        loss: the library's.
        gradients: its, by our names.
        outcomes: of each rank.
        bound: relative.
    """
    found = [
        f"rank {rank}: loss {one.losses[0]!r}, expected {loss!r}"
        for rank, one in enumerate(outcomes)
        if not math.isclose(one.losses[0], loss, rel_tol=bound)
    ]
    floor = 1e-3 * math.sqrt(sum(float(one.double().square().sum()) for one in gradients.values()))
    for name, expected in gradients.items():
        pieces = {rank: one.gradients[name] for rank, one in enumerate(outcomes) if name in one.gradients}
        if pieces or bool(expected.any()):
            found += compare(f"gradient of {name}", pieces, expected, bound * max(float(expected.norm()), floor))
    return found


def checkpoint_tensors(out: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of an imported checkpoint, which lie in files whole."""
    return {name: one for file in sorted(out.rglob("*.safetensors")) for name, one in load_file(file).items()}


def new_whole(folder: Folder, tokenizer: Tokenizer, *, seed: int, stir: float = _STIR, **text: Any) -> Any:
    """Return the library's model of a folder, with weights that are none of them 0 or 1."""
    described: Mapping[str, Any] = json.loads(json.dumps(folder.config))
    ids = {key: tokenizer.token_to_id(folder.processing().placeholder) for key in _IMAGE_TOKENS}
    config = CONFIG_MAPPING[described["model_type"]](
        **{
            **described,
            "text_config": {**described["text_config"], "vocab_size": tokenizer.get_vocab_size(), **text},
        }
    )
    for key, number in ids.items():
        if hasattr(config, key):
            setattr(config, key, number)
    torch.manual_seed(seed)
    made: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    model = made(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=_STIR if "embed_tokens" in name else stir)
    return model


def _tokenizer(folder: Folder) -> Tokenizer:
    """Return a tokenizer of bytes that knows all tokens that a folder's images may need."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    images = folder.processing()
    texts = {images.placeholder, images.marker, END, "<|im_start|>"}
    sizes = [(28, 28), (20, 90), (90, 20), (60, 64)]
    for size in sizes:
        texts |= {piece for piece in images.pattern(size) if isinstance(piece, str) and len(piece) < 30}
    tokenizer.add_special_tokens(sorted(texts))
    return tokenizer
