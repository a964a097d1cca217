"""What compiled layers have in common: objects that pass through their graphs."""

from mimo.model.graphs.carried import ForGraphs, carry, content_of

__all__ = [
    "ForGraphs",
    "carry",
    "content_of",
]
