"""Families of classes that neither the library nor a plugin of ours has, once they are registered with the library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import here
from published import publish
from table import KINDS
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from mimo.testing.comparison import tensors_of
from mimo_transformers import shrink


class Fading(nn.Module):
    """Holds back each number of a row by a share that is learned."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows, each number times its share."""
        return rows * self.shares


class FadingLayer(LlamaDecoderLayer):
    """A layer of Llama whose rows fade before it."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.fading = Fading(config.hidden_size)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return rows after the layer."""
        rows: Tensor = super().forward(self.fading(hidden_states), *args, **kwargs)
        return rows


class FadingConfig(transformers.LlamaConfig):
    """Of the language model."""

    model_type = "fading_llama"


class FadingForCausalLM(transformers.LlamaForCausalLM):
    """Llama with other layers."""

    config_class = FadingConfig

    def __init__(self, config: FadingConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(FadingLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()  # type: ignore[no-untyped-call]


class FadingTowerConfig(transformers.SiglipVisionConfig):
    """Of the tower."""

    model_type = "fading_siglip"


class FadingTowerLayer(SiglipEncoderLayer):
    """A layer of SigLIP whose rows fade before it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.fading = Fading(config.hidden_size)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return rows after the layer."""
        rows: Tensor = super().forward(self.fading(hidden_states), *args, **kwargs)
        return rows


class FadingTower(transformers.SiglipVisionModel):
    """SigLIP with other layers."""

    config_class = FadingTowerConfig

    def __init__(self, config: FadingTowerConfig) -> None:
        super().__init__(config)
        encoder = next(part for part in self.modules() if hasattr(part, "layers"))
        encoder.layers = nn.ModuleList(FadingTowerLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()  # type: ignore[no-untyped-call]


@pytest.fixture
def registered() -> Iterator[None]:
    """Both are registered as the library's documentation says, and gone afterwards."""
    entries: list[tuple[Any, Any]] = []
    for auto, mapping, config, made in (
        (transformers.AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, FadingConfig, FadingForCausalLM),
        (transformers.AutoModel, MODEL_MAPPING, FadingTowerConfig, FadingTower),
    ):
        transformers.AutoConfig.register(config.model_type, config)
        auto.register(config, made)
        entries += [(CONFIG_MAPPING, config.model_type), (mapping, config)]
    yield
    for mapping, key in entries:
        del mapping._extra_content[key]


@pytest.mark.parametrize(
    ("plugin", "model_type", "layouts"),
    [
        ("hf-decoder", "fading_llama", {"one process", "pp=2", "tp=2"}),
        ("hf-encoder", "fading_siglip", {"one process", "tp=2"}),
    ],
)
@pytest.mark.usefixtures("registered")
def test_a_registered_family_is_what_its_class_is(plugin: str, model_type: str, layouts: set[str]) -> None:
    """Whole, in two stages and over two tensor ranks: loss, outputs and every gradient, of each sample alone."""
    outcome = KINDS[plugin](model_type)
    assert (outcome.problem, outcome.weights) == ("", "")
    assert outcome.differences.keys() == layouts


@pytest.mark.usefixtures("registered")
def test_registered_families_are_listed() -> None:
    """Each by the plugin of its kind, with no record of a test."""
    lines = here("models").printed.splitlines()
    for model_type, plugin in (("fading_llama", "hf-decoder"), ("fading_siglip", "hf-encoder")):
        (line,) = [line for line in lines if model_type in line]
        assert line.startswith(f"{plugin} was never tried with 1, and tries one before it is built: "), line


@pytest.mark.usefixtures("registered")
def test_a_registered_family_goes_in_and_out(tmp_path: Path) -> None:
    """By the commands, to the bit."""
    keys = shrink(transformers.AutoConfig.for_model("fading_llama"), vocab_size=15)
    config = transformers.AutoConfig.for_model("fading_llama", **keys)
    publish(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "there")
    for said in (tmp_path / "there", "fading_llama"):
        assert "fading_llama: hf-decoder, language" in here("models", said).printed
    here("checkpoint", "import-hf", tmp_path / "there", "--out", tmp_path / "ours")
    exported = here("checkpoint", "export-hf", tmp_path / "ours", tmp_path / "back").printed
    assert "language as FadingForCausalLM, " in exported
    before, after = tensors_of(tmp_path / "there"), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name].equal(tensor) for name, tensor in after.items())


def test_a_family_that_is_not_registered_is_unknown(tmp_path: Path) -> None:
    """By its folder too: no class of it is looked for there."""
    made = FadingForCausalLM(FadingConfig(**shrink(FadingConfig(), vocab_size=15)))
    publish(made, tmp_path)
    refused = here("checkpoint", "import-hf", tmp_path, "--out", tmp_path / "ours")
    begins = f"{tmp_path / 'config.json'} model_type: expected a family that can be read here"
    assert refused.refused(begins, "got 'fading_llama'"), refused.err
