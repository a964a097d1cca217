"""How tensors and work lie over ranks: the tensor, context and expert axes of a grid, and what moves over them."""

from mimo.model.parallel.context import ContextAxis
from mimo.model.parallel.decisions import Decisions, decided
from mimo.model.parallel.dispatch import Dispatch, counts_of
from mimo.model.parallel.expert import ExpertAxis
from mimo.model.parallel.sharding import Split
from mimo.model.parallel.tensor import TensorAxis

__all__ = [
    "ContextAxis",
    "Decisions",
    "Dispatch",
    "ExpertAxis",
    "Split",
    "TensorAxis",
    "counts_of",
    "decided",
]
