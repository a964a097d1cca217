"""Layers that would make a result depend on the layout, refused when a module is built."""

from __future__ import annotations

from torch import nn

from mimo.hooks import PluginError

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_layers(module: nn.Module, *, name: str) -> None:
    """Refuse PyTorch's own dropout other than 0, whose draws follow the rank, and statistics over samples of a lane.

    Raises:
        PluginError: naming the layer.
    """
    for path, part in module.named_modules():
        inside = part.dropout if isinstance(part, nn.MultiheadAttention | nn.RNNBase) else 0.0
        if inside or (isinstance(part, _DROPOUT) and part.p):
            raise PluginError(
                f"modules.{name}.plugin",
                expected="no dropout of PyTorch's own, since its draws would depend on the layout",
                got=f"{type(part).__name__} at {path or 'the top'}",
                fix="Set its probability to 0, or use mimo.model.runtime.Dropout.",
            )
        if isinstance(part, _STATISTICS):
            raise PluginError(
                f"modules.{name}.plugin",
                expected="no statistics over a batch, since each lane sees other samples",
                got=f"{type(part).__name__} at {path or 'the top'}",
                fix="Use a norm within the sample: LayerNorm, GroupNorm or RMSNorm.",
            )
