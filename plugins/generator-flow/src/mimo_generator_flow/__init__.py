"""Pictures by flow matching from rows of the language model, against mimo's public generator interface only."""

from mimo_generator_flow._config import FlowConfig
from mimo_generator_flow._plugin import FLOW

__all__ = ["FLOW", "FlowConfig"]
