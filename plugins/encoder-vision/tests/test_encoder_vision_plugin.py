"""The plugin as mimo meets it: settings, stages and costs, and how it registers."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mimo.hooks import ConfigError
from mimo.model import EncoderSpec, ProjectorConfig, Stage
from mimo_encoder_vision import CLIP, SIGLIP, VIT, ClipConfig, SiglipConfig, VisionConfig, VitConfig
from mimo_encoder_vision._grids import grids_of
from mimo_encoder_vision._plugin import mimo_register_encoders

SHARED: dict[str, Any] = {"patch": 4, "width": 16, "layers": 2, "heads": 2, "intermediate": 20}
SMALL = VitConfig(**SHARED, channels=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch": 0}, r"config\.patch: expected 1 or more, got 0"),
        ({"channels": 2}, r"config\.channels: expected 1 \(grey\) or 3 \(colour\), got 2"),
        ({"layers": 0}, r"config\.layers: expected 1 or more, got 0"),
        ({"width": 18}, r"config\.width: expected a multiple of 4, for 4 heads and positions in four parts, got 18"),
        ({"width": 16, "heads": 6}, r"config\.width: expected a multiple of 12, for 6 heads"),
        ({"max_patches": 0}, r"config\.max_patches: expected 1 or more, got 0"),
        ({"eps": 0.0}, r"config\.eps: expected a number between 0 and 1, got 0\.0"),
        ({"feature_layer": 0}, r"config\.feature_layer: expected -1 to -4, counted from the last layer, got 0"),
        ({"layers": 2, "feature_layer": -3}, r"config\.feature_layer: expected -1 to -2, .*, got -3"),
        ({"mean": (0.5, 0.5)}, r"config\.mean: expected one number, or one for each of 3 channels, got \[0\.5, 0\.5\]"),
        ({"std": (0.0,)}, r"config\.std: expected one number above 0, or one for each of 3 channels, got \[0\.0\]"),
        ({"std": ()}, r"config\.std: expected one number above 0"),
        (
            {"max_tiles": 3},
            r"config\.max_tiles: expected none, since images of mode 'native' have no use for it, got 3",
        ),
        ({"size": 448}, r"config\.size: expected none, since images of mode 'native' have no use for it, got 448"),
        ({"mode": "tiles", "enlarge": True}, r"config\.enlarge: expected none, since images of mode 'tiles'"),
        (
            {"mode": "fixed", "size": 15},
            r"config\.size: expected pixels that make 1 patches of 16 pixels or more a side",
        ),
        (
            {"mode": "tiles", "projector": ProjectorConfig(shuffle=4)},
            r"config\.size: expected pixels that make a multiple of 4 patches of 16 pixels or more a side, got 224",
        ),
        (
            {"max_patches": 3, "projector": ProjectorConfig(shuffle=2)},
            r"config\.max_patches: expected at least the 4 patches that the projector joins, got 3",
        ),
    ],
)
def test_refused_settings(values: dict[str, Any], message: str) -> None:
    """What is out of range, doesn't go together or would be ignored is named."""
    with pytest.raises(ConfigError, match=message):
        VitConfig(**values)


def test_refused_settings_of_families() -> None:
    """A table needs a place, and a class token can't be joined with others."""
    with pytest.raises(ConfigError, match=r"config\.table: expected 1 or more, or 0 where size holds a patch"):
        SiglipConfig(mode="native", size=8)
    with pytest.raises(ConfigError, match=r"config\.size: expected none, since images of mode 'native' .*, got 384"):
        SiglipConfig(mode="native", size=384, table=16)
    assert SiglipConfig(mode="native", size=384, patch=14, table=27).places == 27
    assert ClipConfig(mode="native", size=42).places == 3
    with pytest.raises(ConfigError, match=r"config\.table: expected 1 or more"):
        SiglipConfig(table=-1)
    with pytest.raises(ConfigError, match=r"config\.keep_class_token: expected false, since the projector joins"):
        ClipConfig(keep_class_token=True, projector=ProjectorConfig(shuffle=2))
    with pytest.raises(ConfigError, match=r"config\.width: expected a multiple of 5, for 5 heads, got 1024"):
        ClipConfig(heads=5)


def test_parts_of_stages() -> None:
    """Every stage holds some of the encoder, the last one the projector."""
    assert VIT.stages is not None
    assert VIT.stages.parts(SMALL, Stage()) == {"encoder", "projector"}
    assert VIT.stages.parts(SMALL, Stage(0, 2)) == {"encoder"}
    assert VIT.stages.parts(SMALL, Stage(1, 2)) == {"encoder", "projector"}
    assert VIT.stages.message_rows(SMALL, (8, 12)) == 6
    assert VIT.stages.width(SMALL) == 16


def test_registers_three_families() -> None:
    """The entry point that mimo reads leads to the specs."""
    (entry,) = entry_points(group="mimo.encoders", name="vit")
    assert entry.load().mimo_register_encoders() == [VIT, SIGLIP, CLIP] == mimo_register_encoders()


def test_tensor_ranks_divide_heads() -> None:
    """Those of a resampler too."""
    resampler = ProjectorConfig(kind="resampler", hidden=12, heads=3)
    assert VIT.tensor is not None
    assert VIT.tensor.divisible(SMALL) == {"heads": 2}
    assert VIT.tensor.divisible(attrs.evolve(SMALL, projector=resampler)) == {"heads": 2, "projector.heads": 3}


def test_registering_imports_no_torch() -> None:
    """Planning a layout with this encoder needs no torch."""
    code = "import sys, mimo_encoder_vision._plugin; assert not {'torch', 'PIL', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter and text


CONFIGS = (
    (VIT, SMALL, [(8, 12), (4, 4)]),
    (SIGLIP, SiglipConfig(**SHARED, mode="native", size=12, projector=ProjectorConfig(shuffle=2)), [(8, 12), (4, 4)]),
    (CLIP, ClipConfig(**SHARED, size=12, feature_layer=-2, final_norm=False), [(8, 12), (4, 4)]),
    (
        CLIP,
        ClipConfig(
            **SHARED,
            mode="tiles",
            size=8,
            keep_class_token=True,
            projector=ProjectorConfig(kind="resampler", hidden=6, heads=2, queries=3),
        ),
        [(8, 24), (9, 8)],
    ),
)


def _products(counter: FlopCounterMode) -> int:
    """Return the operations counted so far in products with weights."""
    by_operation = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in by_operation.items() if "attention" not in str(operation))


@pytest.mark.parametrize(("spec", "config", "sizes"), CONFIGS)
def test_the_formula_counts_the_products(spec: EncoderSpec, config: VisionConfig, sizes: list[tuple[int, int]]) -> None:
    """Multiplications, backward too, are those that PyTorch counts, weights by part those that there are; rows too."""
    items = []
    for size in sizes:
        grids = grids_of(config, size)
        down, across = grids[0]
        items.append({"pixels": torch.randn(len(grids), config.channels, down * 4, across * 4)})
    module: Any = spec.build(config, 24)
    with FlopCounterMode(display=False) as counter:
        rows = module(items)
        forward = _products(counter)
        rows.sum().backward()
    assert rows.shape == (sum(spec.rows(config, size) for size in sizes), 24)
    assert spec.flops is not None
    found = spec.flops(config, 24, Stage(), "none", sizes)
    assert list(found) == ["encoder", "projector"]
    assert sum(work.weighted for work in found.values()) == forward
    assert sum(2 * work.weighted - work.of_items for work in found.values()) == _products(counter) - forward
    for part, work in found.items():
        prefixes = tuple(f"{prefix}." for prefix in spec.parts[part])
        held = [parameter.numel() for name, parameter in module.named_parameters() if name.startswith(prefixes)]
        assert sum(held) == work.weights, part


def test_stages_of_the_formula_share_out_the_whole() -> None:
    """What both stages take adds up, and recomputing keeps less."""
    assert VIT.flops is not None
    whole, *stages = (VIT.flops(SMALL, 24, stage, "none", [(8, 8)]) for stage in (Stage(), Stage(0, 2), Stage(1, 2)))
    assert [list(stage) for stage in stages] == [["encoder"], ["encoder", "projector"]]
    assert sum(stage["encoder"].forward for stage in stages) == whole["encoder"].forward
    kept = [
        VIT.flops(SMALL, 24, Stage(), recompute, [(8, 8)])["encoder"].split
        for recompute in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)
