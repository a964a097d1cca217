"""A head for text models of the library that have none of their own, as the texts of Qwen's and GLM's VLs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from mimo.hooks import ConfigError

_BASE = "model"
TEXT = "_text"
"""Behind a composed model's type that of its text model."""
PLAIN_HEAD: Mapping[str, float | None] = {
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "final_logit_softcapping": None,
}
"""Keys that say what becomes of the products of a head, and what leaves them as they are."""


@cache
def with_head(base: Any) -> Any:
    """Return a class of a text model and a linear without bias behind it, as the composed models have it.

    Args:
        base: the library's class of the text model; whether embedding and head are one its config says.

    Raises:
        ConfigError: when a model is made, of a config that says what else becomes of the products of the head.
    """
    from torch import Tensor, nn
    from transformers.modeling_outputs import CausalLMOutput

    def __init__(self: Any, config: Any) -> None:  # noqa: N807 - of the class below
        _check_plain(config)
        super(made, self).__init__(config)
        setattr(self, _BASE, base(config))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if converters := _converters(config.model_type):
            self._weight_conversions = converters  # what `save_pretrained` looks for
        self.post_init()

    def forward(
        self: Any, input_ids: Tensor | None = None, *, inputs_embeds: Tensor | None = None, **others: Any
    ) -> CausalLMOutput:
        read = getattr(self, _BASE)(input_ids=input_ids, inputs_embeds=inputs_embeds, **others)
        return CausalLMOutput(logits=self.lm_head(read.last_hidden_state))

    made: Any = type(
        base.__name__,
        (base.__base__,),
        {
            "__init__": __init__,
            "forward": forward,
            "__module__": base.__module__,
            "config_class": base.config_class,
            "base_model_prefix": _BASE,
            "_tied_weights_keys": {"lm_head.weight": f"{_BASE}.embed_tokens.weight"},
        },
    )
    return made


def _check_plain(config: Any) -> None:
    for key, plain in PLAIN_HEAD.items():
        if (value := getattr(config, key, plain)) != plain:
            expected = f"{plain}, as the library has no class of {config.model_type!r} that makes logits by it"
            raise ConfigError(f"modules.language.config.values.{key}", expected=expected, got=repr(value))


def _converters(model_type: str) -> list[Any]:
    """Return how a composed model writes what its text model, which says nothing of it, has: experts one by one."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if get_checkpoint_conversion_mapping(model_type) is not None:
        return []
    found = get_checkpoint_conversion_mapping(model_type.removesuffix(TEXT)) or ()
    return [one for one in found if isinstance(one, WeightConverter)]
