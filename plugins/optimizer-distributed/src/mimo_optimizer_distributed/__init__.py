"""AdamW over parameters that are spread over the data lanes of each module; `sharding` is for other plugins too."""

from mimo_optimizer_distributed._plugin import DISTRIBUTED, DistributedConfig

__all__ = ["DISTRIBUTED", "DistributedConfig"]
