"""The plugin as mimo meets it: settings, which parameters are whose, and how it registers."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

from mimo.hooks import ConfigError
from mimo_optimizer_muon import MUON, MuonConfig
from mimo_optimizer_muon._plugin import is_for_adamw, mimo_register_optimizers


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"weight_decay": -0.1},
            r"optimizer\.weight_decay: expected a finite number of 0 or more, less than 1000, got -0\.1",
        ),
        ({"eps": float("inf")}, r"optimizer\.eps: expected a finite number above 0, less than 1000, got inf"),
        ({"momentum": 1.0}, r"optimizer\.momentum: expected a number from 0 to below 1, got 1\.0"),
        ({"iterations": 0}, r"optimizer\.iterations: expected a whole number from 1 to 99, got 0"),
        ({"iterations": 100}, r"optimizer\.iterations: expected a whole number from 1 to 99, got 100"),
        ({"betas": (0.9, 1.0)}, r"optimizer\.betas: expected two numbers from 0 to below 1, got \(0\.9, 1\.0\)"),
        (
            {"adamw": ("head.*", "")},
            r"optimizer\.adamw: expected globs of parameter names, got \['head\.\*', ''\], of which '' matches none\.",
        ),
    ],
)
def test_muon_refused_settings(values: dict[str, Any], message: str) -> None:
    """Each setting out of range is named."""
    with pytest.raises(ConfigError, match=message):
        MuonConfig(**values)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("language.embedding.weight", True),
        ("language.model.embed_tokens.weight", True),
        ("language.head.weight", True),
        ("language.lm_head.weight", True),
        ("vision.patch.weight", True),
        ("vision.patch_embed.projection.weight", True),
        ("language.layers.0.attention.query.weight", False),
        ("language.layers.2.mlp.router.weight", False),
        ("language.layers.2.mlp.experts.up.weight", False),
        ("vision.projector.mlp.down.weight", False),
        ("embedder.layers.0.mlp.up.weight", False),
    ],
)
def test_muon_leaves_inputs_and_outputs_to_adamw(name: str, expected: bool) -> None:
    """What reads ids or patches or writes logits is AdamW's by itself; the name of the module doesn't matter."""
    assert is_for_adamw(name, MuonConfig().adamw) == expected


def test_muon_users_say_what_is_for_adamw() -> None:
    """A list of one's own takes the place of the one that is given; an empty one leaves AdamW no matrix."""
    assert is_for_adamw("vision.projector.mlp.up.weight", ["projector.*"])
    assert not is_for_adamw("language.embedding.weight", ["projector.*"])
    assert not is_for_adamw("language.embedding.weight", [])


def test_muon_is_installed_as_muon() -> None:
    """It registers as a third-party package does."""
    (entry,) = (entry for entry in entry_points(group="mimo.optimizers") if entry.name == "muon")
    assert entry.load().mimo_register_optimizers() == mimo_register_optimizers() == [MUON]


def test_muon_registers_without_torch() -> None:
    """Planning needs no torch."""
    code = "import sys, mimo_optimizer_muon; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0  # noqa: S603 - ours
