"""Which samples a step reads: a function of seed and step, of the data's sizes, and of the history of its weights."""

from mimo.data.order.sample_order import FIRST_ORDER, NEWEST_ORDER, SampleOrder, WeightChange, weights_of_parts

__all__ = ["FIRST_ORDER", "NEWEST_ORDER", "SampleOrder", "WeightChange", "weights_of_parts"]
