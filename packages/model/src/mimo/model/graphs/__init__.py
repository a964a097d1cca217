"""What compiled layers have in common: objects that pass through their graphs."""

from mimo.model.graphs.carried import carry, content_of

__all__ = [
    "carry",
    "content_of",
]
