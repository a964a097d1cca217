"""The plugin as mimo meets it: what the kit looks at, settings and costs, and how it registers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from mimo.hooks import ConfigError
from mimo.model import GENERATORS, OpCost, Stage
from mimo.model.runtime import TensorAxis
from mimo.model.testing import assert_generator_conforms
from mimo_generator_flow import FLOW, FlowConfig
from mimo_generator_flow._plugin import mimo_register_generators

SMALL = FlowConfig(height=8, width=12, patch=4, hidden=24, layers=2, heads=6, intermediate=20, steps=2)


@pytest.mark.parametrize(
    "changes", [{}, {"channels": 1, "time": "logit_normal", "solver": "heun", "drop_condition": 0.0, "guidance": 1.0}]
)
def test_it_keeps_its_promises(changes: dict[str, Any]) -> None:
    """On one rank and on two, of pictures that are smaller, larger and grey."""
    config = attrs.evolve(SMALL, **changes)
    assert FLOW.examples is not None
    assert_generator_conforms(FLOW, FLOW.examples(config), config=config, hidden=10)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"height": 0}, r"config\.height: expected 1 or more, got 0"),
        ({"width": 1 << 16}, r"config\.width: expected at most 32768, got 65536"),
        ({"height": 30}, r"config\.height: expected a multiple of patch = 4, got 30"),
        ({"width": 62}, r"config\.width: expected a multiple of patch = 4, got 62"),
        ({"patch": 0}, r"config\.patch: expected 1 or more, got 0"),
        ({"patch": 1, "width": 1 << 15, "height": 1 << 15}, r"config\.patch: expected one that makes at most 16777216"),
        ({"channels": 2}, r"config\.channels: expected 1 \(grey\) or 3 \(colour\), got 2"),
        ({"layers": 0}, r"config\.layers: expected 1 or more, got 0"),
        ({"heads": 0}, r"config\.heads: expected 1 or more, got 0"),
        ({"intermediate": 0}, r"config\.intermediate: expected 1 or more, got 0"),
        ({"hidden": 18}, r"config\.hidden: expected a multiple of 12, for 6 heads and positions in four parts, got 18"),
        ({"norm_eps": 0.0}, r"config\.norm_eps: expected a number between 0 and 1, got 0\.0"),
        ({"queries": 0}, r"config\.queries: expected 1 or more, got 0"),
        ({"queries": 5000}, r"config\.queries: expected at most 4096, got 5000"),
        ({"drop_condition": 1.0}, r"config\.drop_condition: expected a rate of 0 or more and less than 1, got 1\.0"),
        ({"steps": 0}, r"config\.steps: expected 1 or more, got 0"),
        ({"guidance": -1.0}, r"config\.guidance: expected a finite number of 0 or more, got -1\.0"),
        (
            {"drop_condition": 0.0},
            r"config\.guidance: expected 1, since without drop_condition nothing is learned to guide by, got 2\.0",
        ),
    ],
)
def test_refused_settings(values: dict[str, Any], message: str) -> None:
    """What is out of range, or doesn't go together, is named."""
    with pytest.raises(ConfigError, match=message):
        FlowConfig(**values)


def test_it_registers() -> None:
    """By the hook of generators, under the name that its project file gives."""
    assert mimo_register_generators() == [FLOW]
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'"{re.escape(GENERATORS.group)}"\]\n{FLOW.name} = "mimo_generator_flow\._plugin"', project)


def test_registering_imports_no_torch() -> None:
    """Planning a layout with this generator needs no torch."""
    code = "import sys, mimo_generator_flow._plugin; assert not {'torch', 'PIL', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter and text


def test_settings_say_what_it_reads() -> None:
    """Rows of its placeholder, or those before; targets don't depend on the picture's size."""
    own = attrs.evolve(SMALL, reads="own", queries=7)
    assert (FLOW.reads(SMALL), FLOW.rows(SMALL)) == ("before", 1)
    assert (FLOW.reads(own), FLOW.rows(own)) == ("own", 7)
    assert [FLOW.targets(SMALL, size) for size in ((8, 12), (100, 3))] == [6, 6]
    assert FLOW.tensor is not None
    assert FLOW.tensor.divisible(SMALL) == {"heads": 6}


def test_tensor_ranks_split_what_is_wide() -> None:
    """Heads and the middle of each feed-forward part; the rest is copied, with equal gradients."""
    assert FLOW.tensor is not None
    splits = FLOW.tensor.plan(FLOW.build(SMALL, 10), TensorAxis(size=2))
    assert not any(split.summed for split in splits.values())
    sliced = FLOW.tensor.plan(FLOW.build(SMALL, 10), TensorAxis(size=2, sequence_parallel=True))
    assert {name for name, split in sliced.items() if split.summed} == {
        name for name, split in splits.items() if split.dim is None
    }
    cut = {name: split.dim for name, split in splits.items() if split.dim is not None}
    attention = {"query.weight": 0, "query.bias": 0, "key.weight": 0, "value.weight": 0, "value.bias": 0}
    attention |= {"output.weight": 1}
    mlp = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    wanted = {f"layers.{layer}.attention.{name}": dim for layer in range(2) for name, dim in attention.items()}
    paths = ("layers.0.mlp", "layers.1.mlp")
    assert cut == wanted | {f"{path}.{name}": dim for path in paths for name, dim in mlp.items()}


def test_a_blank_picture_has_the_size_that_was_asked_for() -> None:
    """So it can stand in for one that can't be decoded."""
    assert FLOW.blank is not None
    blank = FLOW.blank((9, 15))
    assert FLOW.measure(blank) == (9, 15)
    assert bool((FLOW.prepare(SMALL, blank)["pixels"] == -1).all())


def _products(counter: FlopCounterMode) -> int:
    """Return the operations counted so far in products with weights."""
    by_operation = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in by_operation.items() if "attention" not in str(operation))


def test_the_formula_counts_the_products() -> None:
    """Multiplications, backward too, are those that PyTorch counts, weights by part those that there are."""
    module: Any = FLOW.build(attrs.evolve(SMALL, drop_condition=0.0, guidance=1.0), 10)
    items = [FLOW.prepare(SMALL, Image.new("L", (9, 9)))] * 3
    rows, spans = torch.randn(7, 10, requires_grad=True), [(0, 4), (2, 7), (3, 3)]
    with FlopCounterMode(display=False) as counter:
        losses = module(items, rows, spans, torch.arange(3))
        forward = _products(counter)
        losses.sum().backward()
    assert FLOW.flops is not None
    found = FLOW.flops(SMALL, 10, Stage(), "none", [(9, 9)] * 3, [4, 5, 0])
    assert list(found) == ["connector", "generator"]
    assert sum(work.weighted for work in found.values()) == forward
    assert sum(2 * work.weighted - work.of_items for work in found.values()) == _products(counter) - forward
    assert found["generator"].inner == 2 * 4 * 24 * (10**2 + 11**2 + 7**2)
    for part, work in found.items():
        prefixes = tuple(f"{prefix}." for prefix in FLOW.parts[part])
        held = [parameter.numel() for name, parameter in module.named_parameters() if name.startswith(prefixes)]
        assert sum(held) == work.weights, part


def test_stages_share_out_what_the_whole_takes() -> None:
    """Layers, and the connector on the first; each sends what is behind the layers, and one row more a picture."""
    assert FLOW.flops is not None
    assert FLOW.stages is not None
    whole, *stages = (
        FLOW.flops(SMALL, 10, stage, "none", [(8, 8)] * 2, [3, 0]) for stage in (Stage(), Stage(0, 2), Stage(1, 2))
    )
    assert [list(stage) for stage in stages] == [["connector", "generator"], ["generator"]]
    assert sum((work for stage in stages for work in stage.values()), OpCost()) == sum(whole.values(), OpCost())
    for index, stage in enumerate(stages):
        cut = FLOW.stages.cut(FLOW.build(SMALL, 10), Stage(index, 2))
        assert sum(work.weights for work in stage.values()) == sum(one.numel() for one in cut.parameters())
    assert [FLOW.stages.message_rows(SMALL, (8, 8), rows) for rows in (3, 1, 0)] == [10, 8, 8]


def test_recomputing_keeps_less_and_costs_more() -> None:
    """By the formula, of the layers."""
    assert FLOW.flops is not None
    none, full = (FLOW.flops(SMALL, 10, Stage(), how, [(8, 8)], [3])["generator"] for how in ("none", "full"))
    assert full.split + full.copied < none.split + none.copied
    assert full.repeated > none.repeated == 0
    assert full.recomputed > none.recomputed == 0
    assert full.forward == none.forward
