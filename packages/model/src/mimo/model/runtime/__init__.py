"""The torch side of the model: layers to write plugins with, `build_part` that makes a rank's share, `MimoModel`."""

from mimo.model.runtime._attention import Segments, attend
from mimo.model.runtime._axis import TensorAxis
from mimo.model.runtime._build import build_part
from mimo.model.runtime._language import NO_LABEL, LanguageBatch, LanguageModule, Ledger
from mimo.model.runtime._layers import Embedding, LayerNorm, Linear, RMSNorm
from mimo.model.runtime._parameters import Split, local
from mimo.model.runtime._part import MimoModel, Part
from mimo.model.runtime._vocabulary import vocabulary_argmax, vocabulary_cross_entropy

__all__ = [
    "NO_LABEL",
    "Embedding",
    "LanguageBatch",
    "LanguageModule",
    "LayerNorm",
    "Ledger",
    "Linear",
    "MimoModel",
    "Part",
    "RMSNorm",
    "Segments",
    "Split",
    "TensorAxis",
    "attend",
    "build_part",
    "local",
    "vocabulary_argmax",
    "vocabulary_cross_entropy",
]
