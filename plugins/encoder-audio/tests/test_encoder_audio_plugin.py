"""The encoder's settings, rows by size, registration and costs, all without torch where it matters."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mimo.hooks import ConfigError
from mimo.model import ProjectorConfig, Stage
from mimo_encoder_audio import WHISPER, WhisperConfig
from mimo_encoder_audio._config import encoded_rows
from mimo_encoder_audio._plugin import mimo_register_encoders

SMALL = WhisperConfig(mels=5, width=16, layers=2, heads=4, intermediate=24, positions=40)
RATE = 16_000


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        ((1, RATE), 1),
        ((320, RATE), 1),
        ((321, RATE), 2),
        ((1600, RATE), 5),
        ((4410, 44_100), 5),
        ((441, 44_100), 1),
        ((480_000, RATE), 1500),
        ((1_323_000, 44_100), 1500),
    ],
)
def test_a_clip_becomes_a_row_each_20_ms(size: tuple[int, int], rows: int) -> None:
    """Begun ones included, whatever its rate."""
    assert WHISPER.rows(WhisperConfig(), size) == rows
    assert WHISPER.rows(WhisperConfig(stack=4), size) == -(-rows // 4)
    assert WHISPER.rows(WhisperConfig(stack=4, silence="hear"), size) == -(-rows // 4)
    assert WHISPER.rows(WhisperConfig(stack=4, silence="keep"), size) == 375
    resampler = ProjectorConfig(kind="resampler", hidden=8, queries=7)
    assert WHISPER.rows(WhisperConfig(projector=resampler), size) == 7


@given(frames=st.integers(1, 10**12), rate=st.integers(1, 768_000), stack=st.sampled_from([1, 2, 3, 4, 5, 10]))
def test_no_clip_has_too_many_rows(frames: int, rate: int, stack: int) -> None:
    """Between one and those of the window, whatever its header says, where long ones are cut."""
    assert 1 <= WHISPER.rows(WhisperConfig(stack=stack, too_long="cut"), (frames, rate)) <= 1500 // stack


@pytest.mark.parametrize("size", [(0, RATE), (-1, RATE), (5, 0)])
def test_no_clip_is_refused(size: tuple[int, int]) -> None:
    """A size without a frame is none."""
    with pytest.raises(ValueError, match=rf"{size[0]} frames at {size[1]} a second are no clip"):
        WHISPER.rows(WhisperConfig(), size)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mels": 0}, r"config\.mels: expected 1 or more, got 0"),
        ({"layers": 0}, r"config\.layers: expected 1 or more, got 0"),
        ({"width": 3, "heads": 1}, r"config\.width: expected 4 or more, got 3"),
        ({"width": 20}, r"config\.width: expected a multiple of 6 heads, and of 2 for sines and cosines, got 20"),
        ({"width": 9, "heads": 3}, r"config\.width: expected a multiple of 3 heads, and of 2"),
        ({"silence": "pad"}, r"config\.silence: expected 'skip' or 'hear' or 'keep', got 'pad'"),
        ({"too_long": "drop"}, r"config\.too_long: expected 'refuse' or 'cut', got 'drop'"),
        ({"stack": 8}, r"config\.stack: expected a divisor of positions = 1500, got 8"),
        (
            {"projector": ProjectorConfig(shuffle=2)},
            r"projector\.shuffle: expected 1, .*, got 2\. Join rows by config\.st",
        ),
    ],
)
def test_refused_settings(values: dict[str, Any], message: str) -> None:
    """Each setting out of range is named."""
    with pytest.raises(ConfigError, match=message):
        WhisperConfig(**values)


def test_parts_of_stages() -> None:
    """Every stage holds some of the encoder, the last one the projector; all rows pass, dropped only at the end."""
    assert WHISPER.stages is not None
    assert WHISPER.stages.parts(SMALL, Stage()) == {"encoder", "projector"}
    assert WHISPER.stages.parts(SMALL, Stage(0, 2)) == {"encoder"}
    assert WHISPER.stages.parts(SMALL, Stage(1, 2)) == {"encoder", "projector"}
    assert WHISPER.stages.message_rows(attrs.evolve(SMALL, silence="hear"), (320, RATE)) == 40
    assert WHISPER.stages.message_rows(SMALL, (321, RATE)) == 2
    assert WHISPER.stages.width(SMALL) == 16


def test_heads_of_a_resampler_are_split_too() -> None:
    """Tensor ranks must divide both counts of heads."""
    assert WHISPER.tensor is not None
    assert WHISPER.tensor.divisible(SMALL) == {"heads": 4}
    config = attrs.evolve(SMALL, projector=ProjectorConfig(kind="resampler", hidden=6, heads=3))
    assert WHISPER.tensor.divisible(config) == {"heads": 4, "projector.heads": 3}


def test_registers_as_whisper() -> None:
    """The entry point that mimo reads leads to the spec."""
    (entry,) = entry_points(group="mimo.encoders", name="whisper")
    assert entry.load().mimo_register_encoders() == [WHISPER] == mimo_register_encoders()
    assert WHISPER.modality == "audio"


def test_registering_imports_nothing_heavy() -> None:
    """Planning a layout with this encoder needs neither torch nor what reads sound."""
    heavy = "{'torch', 'numpy', 'soundfile', 'soxr'}"
    code = f"import sys, mimo_encoder_audio._plugin; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter and text


def _products(counter: FlopCounterMode) -> int:
    """Return the operations counted so far in products with weights."""
    by_operation = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in by_operation.items() if "attention" not in str(operation))


@pytest.mark.parametrize(
    "config", [SMALL, attrs.evolve(SMALL, stack=2, silence="hear"), attrs.evolve(SMALL, stack=4, silence="keep")]
)
def test_the_formula_counts_the_products(config: WhisperConfig) -> None:
    """Multiplications, backward too, and weights by part are those that PyTorch counts."""
    sizes = [(1000, RATE), (12_000, RATE), (1, RATE)]
    items = [{"mel": torch.randn(2 * encoded_rows(config, size) + 2, config.mels)} for size in sizes]
    module: Any = WHISPER.build(config, 24)
    with FlopCounterMode(display=False) as counter:
        rows = module(items, sizes)
        forward = _products(counter)
        rows.sum().backward()
    assert WHISPER.flops is not None
    found = WHISPER.flops(config, 24, Stage(), "none", sizes)
    assert list(found) == ["encoder", "projector"]
    assert sum(work.weighted for work in found.values()) == forward
    assert sum(2 * work.weighted - work.of_items for work in found.values()) == _products(counter) - forward
    for part, work in found.items():
        prefixes = tuple(WHISPER.parts[part])
        assert work.weights == sum(p.numel() for name, p in module.named_parameters() if name.startswith(prefixes))


def test_stages_of_the_formula_share_out_the_whole() -> None:
    """What both stages take adds up, and recomputing keeps less."""
    assert WHISPER.flops is not None
    sizes = [(12_000, RATE)]
    whole, *stages = (WHISPER.flops(SMALL, 24, stage, "none", sizes) for stage in (Stage(), Stage(0, 2), Stage(1, 2)))
    assert [list(stage) for stage in stages] == [["encoder"], ["encoder", "projector"]]
    assert sum(stage["encoder"].forward for stage in stages) == whole["encoder"].forward
    kept = [WHISPER.flops(SMALL, 24, Stage(), way, sizes)["encoder"].split for way in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
