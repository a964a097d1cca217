"""What the last stage of a language model is trained by: losses of rows by their logits, split over tensor ranks."""

from mimo.model.losses.chunked import Head, chunked_losses, chunks_of
from mimo.model.losses.cross_entropy import CrossEntropy, vocabulary_argmax, vocabulary_cross_entropy
from mimo.model.losses.divergence import Divergence, TopIds
from mimo.model.losses.hidden import HiddenLoss, hidden_losses
from mimo.model.losses.rows import LogitsRead, RowLoss, row_losses

__all__ = [
    "CrossEntropy",
    "Divergence",
    "Head",
    "HiddenLoss",
    "LogitsRead",
    "RowLoss",
    "TopIds",
    "chunked_losses",
    "chunks_of",
    "hidden_losses",
    "row_losses",
    "vocabulary_argmax",
    "vocabulary_cross_entropy",
]
