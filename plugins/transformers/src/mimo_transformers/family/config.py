"""Settings of ``hf-decoder`` and ``hf-encoder``: a model type, and the keys of its ``config.json`` as they are."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from typing import Any, Literal

import attrs

from mimo.hooks import ConfigError, at_least, check_at_most
from mimo.model import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_LEARNED_ROWS,
    MAX_PIXELS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    ProjectorConfig,
)
from mimo_transformers.family.library import config_of, keys_of

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_BALANCE = ("router_aux_loss_coef", "aux_loss_coef")
_WHERE = "modules.language.config"
_USUAL_SIZE = 224
_ELSEWHERE = dict.fromkeys(("dtype", "torch_dtype"), "run.precision says it")
"""Keys of a ``config.json`` that other settings say."""


@attrs.frozen(kw_only=True)
class HfConfig:
    """A model of `transformers`.

    Args:
        model_type: of its ``config.json``: ``olmo2``, ``gemma3_text``.
        values: its other keys; what is left out is as in the library.
        null: keys of which the value is null there, which a settings file can't say; ``rope_parameters.full_attention``
            inside of another.
    """

    model_type: str
    null: tuple[str, ...] = ()
    values: Mapping[str, Any] = attrs.field(factory=dict)

    def library(self) -> Any:
        """Return the library's config, which may be changed."""
        return deepcopy(self._made)  # which takes a tenth of the time of making it

    @cached_property
    def _made(self) -> Any:
        return self._make()

    def _make(self) -> Any:
        return self._library("config")

    def _library(self, where: str, **others: Any) -> Any:
        """Return the library's config.

        Args:
            where: path of these settings.
            others: further keys.

        Raises:
            ConfigError: a key is misspelt, or belongs elsewhere.
        """
        for key, place in {**_ELSEWHERE, **self._elsewhere()}.items():
            if key in self.values:
                raise ConfigError(f"{where}.values.{key}", expected=f"nothing, as {place}", got=repr(self.values[key]))
        library = config_of(self.model_type, {**self._keys(where), **others}, where=where)
        known = keys_of(self.model_type)
        for key in self.values:
            near = difflib.get_close_matches(key, known - {key}, n=1, cutoff=0.85) if key not in known else []
            if near:
                got, fix = "an unknown one", f"Did you mean {near[0]!r}?"
                raise ConfigError(f"{where}.values.{key}", expected=f"a key of {self.model_type!r}", got=got, fix=fix)
        return library

    def _elsewhere(self) -> Mapping[str, str]:
        """Return further keys that other settings say."""
        return {}

    def _keys(self, where: str) -> dict[str, Any]:
        values = dict(self.values)
        for path in self.null:
            *tables, key = path.split(".")
            inside = values
            for name in tables:
                found = inside.get(name) or {}
                if not isinstance(found, Mapping):
                    raise ConfigError(f"{where}.null", expected=f"{name} to be a table, for {path}", got=repr(found))
                inside[name] = inside = dict(found)
            inside[key] = None
        return values


@attrs.frozen(kw_only=True)
class HfEncoderConfig(HfConfig):
    """A vision tower of `transformers` that sees images of one size.

    Args:
        size: side of an image in pixels; 0 for that of the model's own ``image_size``.
        crop: whether an image is shrunk to cover it and its middle cut out; otherwise it is stretched.
        resample: how pixels are interpolated.
        mean: subtracted from pixels of 0 to 1: one number, or one for each channel.
        std: that they are divided by then, likewise.
        feature_layer: whose rows are handed on: -1 for those that the model returns, -2 for those before its last
            layer. What lies beyond is kept with the weights, and not trained.
        class_tokens: how many of the rows before those of patches are handed on, the first ones.
        projector: from the tower's rows to the language model's.
    """

    size: int = attrs.field(default=0, validator=at_least(0, where="config"))
    crop: bool = False
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    feature_layer: int = -1
    class_tokens: int = attrs.field(default=0, validator=at_least(0, where="config"))
    projector: ProjectorConfig = attrs.field(factory=ProjectorConfig)

    def __attrs_post_init__(self) -> None:
        """Refuse what is out of range."""
        check_at_most(self, {"size": MAX_PIXELS, "class_tokens": MAX_LEARNED_ROWS}, where="config")
        if self.feature_layer >= 0 or self.feature_layer < -MAX_LAYERS:
            got = repr(self.feature_layer)
            raise ConfigError("config.feature_layer", expected="-1 or less, counted from the last layer", got=got)
        if not self.std or min(self.std) <= 0:
            raise ConfigError("config.std", expected="numbers above 0", got=repr(list(self.std)))

    def _make(self) -> Any:
        library = self._library("config")
        limits = {"num_hidden_layers": MAX_LAYERS, "hidden_size": MAX_WIDTH, "patch_size": MAX_PIXELS}
        known = {key: most for key, most in limits.items() if isinstance(getattr(library, key, None), int)}
        check_at_most(library, known, where="config.values")
        return library

    @property
    def heads(self) -> Mapping[str, int]:
        """Counts of heads, by the keys that set them."""
        return _counts_of_heads(self.library())

    @property
    def side(self) -> int:
        """Side of an image in pixels."""
        own = getattr(self.library(), "image_size", None)
        if isinstance(own, list | tuple) and own:
            own = own[0]
        found = self.size or (own if isinstance(own, int) else 0) or _USUAL_SIZE
        if found > MAX_PIXELS:
            raise ConfigError("config.values.image_size", expected=f"at most {MAX_PIXELS}", got=repr(found))
        return found

    @property
    def channels(self) -> int:
        """Channels of an image: 1 or 3."""
        found = int(getattr(self.library(), "num_channels", 3))
        if found not in (1, 3):
            raise ConfigError("config.values.num_channels", expected="1 (grey) or 3 (colour)", got=repr(found))
        return found


@attrs.frozen(kw_only=True)
class HfDecoderConfig(HfConfig):
    """A language model of `transformers`.

    Args:
        vocabulary: number of token ids, 0 for that of the tokenizer.
        bidirectional_items: whether the rows of one item, such as an image, all see each other, those before a layer's
            window excepted; as in the composed model of Gemma 3, which says it nowhere in its ``config.json``.
        deepstack: how many first layers add rows that encoders deliver beside those of the placeholders, each row of
            ``hidden_size`` columns followed by so many others; as the tower of Qwen3-VL does
            (``deepstack_visual_indexes``).
    """

    vocabulary: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))
    bidirectional_items: bool = False
    deepstack: int = attrs.field(default=0, validator=at_least(0, where=_WHERE))

    def __attrs_post_init__(self) -> None:
        """Refuse what is too large."""
        check_at_most(self, {"vocabulary": MAX_VOCABULARY, "deepstack": MAX_LAYERS}, where=_WHERE)

    def _make(self) -> Any:
        return self._library(_WHERE, **({"vocab_size": self.vocabulary} if self.vocabulary else {}))

    def _elsewhere(self) -> Mapping[str, str]:
        return {"vocab_size": "vocabulary says it"}

    @property
    def hidden(self) -> int:
        """Width of a row."""
        library = self.library()
        check_at_most(library, {"hidden_size": MAX_WIDTH}, where=f"{_WHERE}.values")
        return int(library.hidden_size)

    @property
    def layers(self) -> int:
        """Number of layers."""
        library = self.library()
        check_at_most(library, {"num_hidden_layers": MAX_LAYERS}, where=f"{_WHERE}.values")
        if library.num_hidden_layers < 1:
            got = repr(library.num_hidden_layers)
            raise ConfigError(f"{_WHERE}.values.num_hidden_layers", expected="1 or more", got=got)
        return int(library.num_hidden_layers)

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are one parameter."""
        return bool(getattr(self.library(), "tie_word_embeddings", False))

    @property
    def heads(self) -> Mapping[str, int]:
        """Counts of heads, by the keys that set them."""
        return _counts_of_heads(self.library())

    @property
    def experts(self) -> int:
        """Number of experts of a layer that has some, 0 for none."""
        library = self.library()
        for key in _EXPERTS:
            if isinstance(getattr(library, key, None), int):
                check_at_most(library, {key: MAX_HEADS}, where=f"{_WHERE}.values")
                return int(getattr(library, key))
        return 0

    @property
    def experts_per_token(self) -> int:
        """How many experts each row goes to; all of them where the library has no such key."""
        return int(getattr(self.library(), "num_experts_per_tok", None) or self.experts)

    @property
    def balance_loss(self) -> float | None:
        """Coefficient of the library's loss on unequal loads of experts, None where nothing asks for it.

        Raises:
            ConfigError: ``output_router_logits`` does, and the library knows no such loss of this model.
        """
        library = self.library()
        if not getattr(library, "output_router_logits", False):
            return None
        key = next((key for key in _BALANCE if key in keys_of(self.model_type)), None)
        if key is None:
            raise ConfigError(
                f"{_WHERE}.values.output_router_logits",
                expected="false, since transformers has no loss on the loads of experts of this model",
                got=f"true for {self.model_type!r}",
                fix="Leave it out.",
            )
        found = getattr(library, key)
        if not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise ConfigError(f"{_WHERE}.values.{key}", expected="a finite number of 0 or more", got=repr(found))
        return float(found)

    norm_eps = 0.0
    next_tokens = 0
    next_tokens_loss = 0.0


def _counts_of_heads(library: Any) -> Mapping[str, int]:
    count = getattr(library, "num_attention_heads", None)
    return {"values.num_attention_heads": count} if isinstance(count, int) and count else {}
