"""The C-RADIO vision transformer, written against mimo's public encoder interface only."""

from mimo_encoder_radio._config import RadioConfig
from mimo_encoder_radio._plugin import RADIO

__all__ = ["RADIO", "RadioConfig"]
