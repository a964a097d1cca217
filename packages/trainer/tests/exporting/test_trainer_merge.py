"""Weights with what LoRA adds to them, read in any pieces from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.checkpoint import Stream, read_manifest, write_checkpoint
from mimo.hooks import CheckpointError, ConfigError
from mimo.model import DECODER, HfTensor, lora_linear, lora_names
from mimo.trainer.exporting.adapter import write_adapter
from mimo.trainer.exporting.merge import open_merged
from mimo.trainer.resume.chain import links_of, mark_chain

LORA = {"rank": 2, "alpha": 5.0, "targets": ["*"]}
SHAPES: Mapping[str, tuple[int, ...]] = {
    "m.one.weight": (5, 3),
    "m.one.lora.down": (2, 3),
    "m.one.lora.up": (5, 2),
    "m.many.weight": (3, 4, 5),
    "m.many.lora.down": (3, 2, 5),
    "m.many.lora.up": (3, 4, 2),
    "m.other.weight": (2, 3),
    "optimizer.m.one.lora.up.exp_avg": (5, 2),
}


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    lora: Any = LORA,
    common: Mapping[str, Any] | None = None,
    frozen: Any = True,
) -> Path:
    """Write a checkpoint of a module, by default an adapted one."""
    streams = {
        name: Stream(dtype=one.dtype, shape=tuple(one.shape), chunks=partial(iter, [one.flatten()]))
        for name, one in tensors.items()
    }
    config = {"modules": {"m": {"lora": lora, "frozen": frozen}}}
    return write_checkpoint(folder, streams, config=config, topology={"m": {}}, common=common or {})


def test_any_elements_hold_the_sum(tmp_path: Path) -> None:
    """Of a matrix and of those of experts, from anywhere to anywhere; the rest is as it is, and no state is there."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    wanted = {"m.other.weight": tensors["m.other.weight"]}
    for linear in ("m.one", "m.many"):
        product = tensors[f"{linear}.lora.up"] @ tensors[f"{linear}.lora.down"]
        wanted[f"{linear}.weight"] = tensors[f"{linear}.weight"] + 2.5 * product
    with open_merged(write(tmp_path, tensors)) as merged:
        assert merged.tensors.keys() == wanted.keys()
        for name, whole in wanted.items():
            for begin in range(whole.numel()):
                for end in range(begin + 1, whole.numel() + 1):
                    found = torch.cat([chunk.clone() for chunk in merged.elements(name, begin, end)])
                    torch.testing.assert_close(found, whole.flatten()[begin:end])


@pytest.mark.parametrize("lacking", ["m.one.weight", "m.one.lora.down"])
def test_what_is_there_in_part_is_refused(tmp_path: Path, lacking: str) -> None:
    """By the names of what is missing."""
    folder = write(tmp_path, {name: torch.zeros(shape) for name, shape in SHAPES.items() if name != lacking})
    text = f"expected all that belongs to m.one, got none of {lacking}"
    with pytest.raises(CheckpointError, match=text), open_merged(folder):
        pass


@pytest.mark.parametrize("adapted", [True, False], ids=["of another linear", "of none"])
def test_what_lora_learned_before_is_not_added_again(adapted: bool, tmp_path: Path) -> None:
    """A checkpoint that leaves weights out takes these alone from the other: no LoRA that its own run has not."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    base = write(tmp_path / "base", tensors)
    own = {name: torch.randn(SHAPES[name]) for name in lora_names("m.many")} if adapted else {}
    common = {"base.folder": str(base), "base.identity": read_manifest(base).identity}
    with open_merged(write(tmp_path / "own", own, lora=LORA if adapted else None, common=common)) as merged:
        assert merged.tensors.keys() == {"m.one.weight", "m.many.weight", "m.other.weight"}
        assert torch.equal(merged.whole("m.one.weight"), tensors["m.one.weight"])
        assert len(merged.linears) == adapted


def test_a_circle_of_checkpoints_is_refused(tmp_path: Path) -> None:
    """One that says its weights are in itself is followed nowhere."""
    tensors = {"m.other.weight": torch.zeros(2, 3)}
    first = write(tmp_path / "first", tensors, common={"base.folder": "", "base.identity": ""})
    itself = {"base.folder": str(tmp_path / "own" / first.name), "base.identity": read_manifest(first).identity}
    folder = write(tmp_path / "own", tensors, common=itself)
    assert read_manifest(folder).identity == itself["base.identity"]
    with pytest.raises(CheckpointError, match=r"leaves out, got a checkpoint that leads there\.$"):
        links_of(folder)


def test_a_folder_that_cannot_be_marked_as_needed_is_named(tmp_path: Path) -> None:
    """Of those that a run's `keep` may remove; from other folders nothing is."""
    tensors = {"m.other.weight": torch.zeros(2, 3)}
    folders = [write(tmp_path / name, tensors) for name in ("checkpoints", "imported")]
    for folder in folders:
        (folder / "needed_by").mkdir()
    links = [link for folder in folders for link in links_of(folder)]
    message = f"{folders[0]} is needed from here on, and can't be marked so (Is a directory)"
    assert mark_chain(links[0], links, tmp_path) == [message]
    assert mark_chain(links[1], links, tmp_path) == mark_chain(None, links, tmp_path) == []
    (folders[0] / "needed_by").rmdir()
    assert mark_chain(links[0], links, tmp_path / "run") == []
    assert (folders[0] / "needed_by").read_text() == f"{tmp_path / 'run'}\n"
    (tmp_path / "best").symlink_to(folders[0])
    links = list(links_of(tmp_path / "best"))
    assert mark_chain(links[0], links, tmp_path / "other") == []  # where a link leads, too
    assert (folders[0] / "needed_by").read_text() == f"{tmp_path / 'run'}\n{tmp_path / 'other'}\n"


@pytest.mark.parametrize(
    ("frozen", "taught"),
    [
        ([], ""),
        (True, ""),
        (["layers.*", "norm.*"], ""),
        (False, "norm.weight and 1 more"),
        (["norm.*"], "layers.0.mlp_norm.weight"),
    ],
    ids=str,
)
def test_an_adapter_is_all_that_was_trained_or_is_refused(frozen: Any, taught: str, tmp_path: Path) -> None:
    """Of what the published model has: PEFT would take its own weights for whatever else was."""
    names = ("layers.0.mlp.up.weight", *lora_names("layers.0.mlp.up"), "norm.weight", "layers.0.mlp_norm.weight")
    shapes = dict(zip((f"m.{name}" for name in names), [(5, 3), (2, 3), (5, 2), (3,), (3,)], strict=True))
    table = [HfTensor(ours=name, theirs=name) for name in names if lora_linear(name) is None]
    folder = write(tmp_path, {name: torch.zeros(shape) for name, shape in shapes.items()}, frozen=frozen)
    with open_merged(folder) as merged, nullcontext() if not taught else pytest.raises(ConfigError) as refused:
        count = write_adapter(
            merged, tmp_path / "out", module="m", spec=DECODER, table=table, linears=table, dtype=torch.float32
        )
        assert count == 1
    if refused is not None:
        assert f"got one of which {taught} was trained too. Export without --adapter" in str(refused.value)
