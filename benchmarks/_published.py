"""A decoder of ours beside the same model of `transformers`: the same weights and samples, each in its own form.

Ours takes samples packed one after the other. `transformers` takes a batch, and attends by PyTorch's kernel: without a
mask where all samples are equally long, which is its quickest way, and otherwise padded to the longest.
"""

from __future__ import annotations

import pydoc_data.topics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from mimo.model import DECODER, LanguageModelSpec, Stage
from mimo.model.runtime import NO_LABEL, LanguageBatch, Part, TensorAxis, build_part, local, read_hf
from mimo.topology import Grid

VOCABULARY = 8192
TEXT_LENGTHS = tuple(len(text.split()) for text in pydoc_data.topics.topics.values())
"""Real lengths of texts: the topics of Python's own help, in words."""


@attrs.frozen(kw_only=True)
class Llama:
    """A size of the model, and the samples of its step."""

    hidden: int
    layers: int
    lengths: Sequence[int]

    def steps(
        self, mesh: DeviceMesh, spec: LanguageModelSpec = DECODER
    ) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return ours and theirs: forward and backward, which returns the mean loss of a label.

        Args:
            mesh: of one rank, as parameters lie on one where modules are trained.
            spec: of ours.
        """
        torch.manual_seed(0)
        samples = [torch.randint(0, VOCABULARY, (length,)) for length in self.lengths]
        model = self._published()
        return self._ours(_part(model, mesh, spec), samples), _theirs(model, samples)

    def compiled(self, mesh: DeviceMesh) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return ours twice: with layers compiled by ``inductor``, and eager; see `steps`."""
        torch.manual_seed(0)
        samples = [torch.randint(0, VOCABULARY, (length,)) for length in self.lengths]
        model = self._published()
        compiled, eager = (
            self._ours(_part(model, mesh, DECODER, compile_backend=backend), samples) for backend in ("inductor", "")
        )
        return compiled, eager

    def _published(self) -> Any:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=self.hidden,
                intermediate_size=self.hidden * 11 // 4,
                num_hidden_layers=self.layers,
                num_attention_heads=self.hidden // 64,
                num_key_value_heads=self.hidden // 128,
                use_cache=False,
            )
        )
        model.set_attn_implementation("sdpa")
        return model

    def _ours(self, part: Part, samples: Sequence[Tensor]) -> Callable[[], Tensor]:
        tokens = torch.cat([*samples])
        labels = torch.cat([torch.cat([sample[1:], torch.tensor([NO_LABEL])]) for sample in samples])
        positions = torch.cat([torch.arange(len(sample)) for sample in samples])
        labelled = (labels != NO_LABEL).nonzero().squeeze(1)

        def step() -> Tensor:
            for parameter in part.module.parameters():
                parameter.grad = None
            batch = LanguageBatch.of(tokens, labels, positions, lengths=[len(sample) for sample in samples])
            losses = part.language.losses(part.language(batch, {}, None), labels, labelled)
            loss = losses.sum() / len(labelled)
            loss.backward()
            return loss.detach()

        return step


def _part(model: Any, mesh: DeviceMesh, spec: LanguageModelSpec, *, compile_backend: str = "") -> Part:
    """Return a language model of ours with a model's settings and weights, as it is built to be trained."""
    every = [*spec.hf, *([spec.hf_any.of("llama")] if spec.hf_any else ())]
    family = next(family for family in every if family is not None and family.model_type == "llama")
    config = spec.config(**family.settings(model.config.to_dict()))
    plain = spec.build(config, Stage())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {
            name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()
        }
    read_hf(plain, family, config, files)
    part = build_part(
        spec,
        config,
        grid=Grid(name="language", ranks=(0,)),
        seed=0,
        axis=TensorAxis.of(mesh, sequence_parallel=False),
        mesh=mesh,
        device=torch.device("cpu"),
        compile_backend=compile_backend,
    )
    with torch.no_grad():
        for name, value in plain.state_dict().items():
            local(part.parameters[f"language.{name}"]).copy_(value)
    return part


def _theirs(model: Any, samples: Sequence[Tensor]) -> Callable[[], Tensor]:
    longest = max(map(len, samples))
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, mask = torch.full_like(tokens, NO_LABEL), torch.zeros_like(tokens)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = labels[row, : len(sample)] = sample
        mask[row, : len(sample)] = 1
    given = {} if mask.all() else {"attention_mask": mask}

    def step() -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss: Tensor = model(input_ids=tokens, labels=labels, **given).loss
        loss.backward()
        return loss.detach()

    return step
