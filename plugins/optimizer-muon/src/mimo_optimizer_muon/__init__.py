"""Muon over matrices that are cut over any ranks, written against mimo's public optimizer interface only."""

from mimo_optimizer_muon._plugin import MUON, MuonConfig

__all__ = ["MUON", "MuonConfig"]
