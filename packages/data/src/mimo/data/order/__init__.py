"""Which samples a step reads: a function of seed and step, of the data's sizes, and of the history of its weights."""

from mimo.data.order.sample_order import FIRST_ORDER, NEWEST_ORDER, SampleOrder, WeightChange, weights_of_parts
from mimo.data.order.token_batches import MAX_BATCH_SAMPLES, TokenBatch, token_batch

__all__ = [
    "FIRST_ORDER",
    "MAX_BATCH_SAMPLES",
    "NEWEST_ORDER",
    "SampleOrder",
    "TokenBatch",
    "WeightChange",
    "token_batch",
    "weights_of_parts",
]
