"""Saving and loading in one process without a group."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.checkpoint import _manifest_file, latest, load, read_manifest, save, verify
from mimo.checkpoint._tensors import DTYPES
from mimo.hooks import CheckpointError, Common, Owned

ABOUT: dict[str, Any] = {"config": {"run": {"seed": 1}}, "topology": {"vision": [0]}}


def make_tree(seed: int = 0) -> dict[str, Any]:
    """Two modules with the same inner names, an optimizer's state and JSON leaves."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "vision": {"patch.weight": tensor(7, 5), "norm.weight": tensor(5)},
        "language": {"patch.weight": tensor(3, 2, 4), "norm.weight": tensor(5).bfloat16()},
        "optimizer": {"vision": {"norm.weight": {"step": torch.tensor(float(seed)), "exp_avg": tensor(5)}}},
        "progress": {"step": Common(seed), "best": Common([math.inf, {"loss": 0.5}])},
        "plugin": {"settings": Owned({"lr": 1e-3, "name": "ä"}, "vision")},
    }


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested dicts for comparing."""
    if isinstance(tree, dict):
        return {k: v for key, below in tree.items() for k, v in leaves(below, f"{path}/{key}").items()}
    return {path: tree}


def assert_same(found: Any, expected: Any) -> None:
    """Compare two trees leaf by leaf, bit by bit."""
    assert leaves(found).keys() == leaves(expected).keys()
    for name, leaf in leaves(expected).items():
        other = leaves(found)[name]
        assert torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else repr(leaf) == repr(other), name


def saved(tmp_path: Path, step: int = 3) -> Path:
    """Save the tree of `make_tree`."""
    return save(tmp_path, step, make_tree(step), **ABOUT)


def test_what_was_saved_comes_back_in_place(tmp_path: Path) -> None:
    """Tensors are filled in place and JSON leaves come back wrapped as they were."""
    step = saved(tmp_path)
    tree = make_tree(9)
    weight = tree["vision"]["patch.weight"]
    found: Any = load(step, tree).tree
    assert step == tmp_path / "step_00000003"
    assert found["vision"]["patch.weight"] is weight
    assert_same(found, make_tree(3))


def test_manifest_names_what_is_held(tmp_path: Path) -> None:
    """The manifest holds step, names, values, config and topology."""
    manifest = read_manifest(saved(tmp_path))
    assert manifest.step == 3
    assert {"vision.patch.weight", "language.patch.weight", "progress.step", "plugin.settings"} <= manifest.names
    assert manifest.tensors["language.norm.weight"].dtype == "BF16"
    assert manifest.tensors["optimizer.vision.norm.weight.step"].shape == ()
    assert manifest.common["progress.best"] == [math.inf, {"loss": 0.5}]
    assert (manifest.owned["plugin.settings"].module, manifest.owned["plugin.settings"].value["name"]) == (
        "vision",
        "ä",
    )
    assert (manifest.config, manifest.topology) == (ABOUT["config"], ABOUT["topology"])


def test_structure_signature_changes_with_structure_only(tmp_path: Path) -> None:
    """Other numbers keep the signature, another entry changes it."""
    first = read_manifest(saved(tmp_path, 1)).structure
    assert read_manifest(saved(tmp_path, 2)).structure == first
    assert read_manifest(save(tmp_path, 3, make_tree() | {"more": Common(1)}, **ABOUT)).structure != first


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_each_dtype_comes_back(tmp_path: Path, code: str) -> None:
    """Every dtype of the format keeps its bits."""
    tensor = torch.tensor([0, 1, 3, 7]).to(DTYPES[code])
    step = save(tmp_path, 1, {"x": tensor}, **ABOUT)
    target = torch.zeros(4).to(DTYPES[code])
    load(step, {"x": target})
    assert torch.equal(target.view(torch.uint8), tensor.view(torch.uint8))


def test_tensors_of_any_layout_come_back(tmp_path: Path) -> None:
    """Views, transposed, empty, 0-d and gradient-carrying tensors are saved and filled by value."""
    whole = torch.arange(24.0).reshape(4, 6)
    tree = {
        "transposed": whole.T,
        "view": whole[1:3, ::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "trained": torch.nn.Parameter(whole.clone()),
        "negative": torch._neg_view(whole),
    }
    step = save(tmp_path, 1, tree, **ABOUT)
    target = {
        "transposed": torch.zeros(4, 6).T,
        "view": torch.zeros(4, 6)[1:3, ::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(0, dtype=torch.int64),
        "trained": torch.nn.Parameter(torch.zeros(4, 6)),
        "negative": torch._neg_view(torch.zeros(4, 6)),
    }
    load(step, target)
    for name, tensor in tree.items():
        assert torch.equal(target[name], tensor), name


@pytest.mark.parametrize(
    "value",
    [
        *(1, -(2**70), 0.1, -0.0, math.nan, math.inf, -math.inf, True, None, "\ud800 \n", [[]], {"": {"a": [1.0, 1]}}),
        *({"$float": "nan"}, {"$$float": math.nan}, {"$float": 1, "b": 2}, [{"$float": {"$float": 0}}]),
    ],
)
def test_json_values_come_back_exactly(tmp_path: Path, value: Any) -> None:
    """Numbers keep their type, NaN and infinities survive, and nothing of the user's is taken for our marks."""
    step = save(tmp_path, 1, {"a": Common(value), "b": Owned(value, "vision")}, **ABOUT)
    found: Any = load(step, {"a": Common(0), "b": Owned(0, "vision")}).tree
    assert repr(found["a"].value) == repr(value)
    assert repr(found["b"]) == repr(Owned(value, "vision"))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (3, r"optimizer\.lr: expected a tensor, a DTensor, Common\(value\).*got a builtins\.int.*Declare"),
        (b"x", r"optimizer\.lr: .*got a builtins\.bytes"),
        (Common((1, 2)), r"optimizer\.lr: expected a JSON value.*got a builtins\.tuple"),
        (Common({"a": [1, {2}]}), r"optimizer\.lr\.a\[1\]: expected a JSON value.*got a builtins\.set"),
        (Common({1: 2}), r"optimizer\.lr: .*got a dict with other keys"),
        (Common(1 << 20_000), r"optimizer\.lr: .*got a builtins\.int"),
        (torch.zeros(2, device="meta"), r"optimizer\.lr: expected a dense tensor with data, got a meta tensor"),
        (torch.eye(2).to_sparse(), r"optimizer\.lr: .*got a torch\.sparse_coo tensor"),
        (torch.zeros(2, dtype=torch.complex64), r"optimizer\.lr: expected a dtype of .*got torch\.complex64"),
        (Owned(1, ""), r"optimizer\.lr: expected Owned with the name of a module, got ''"),
        ({3: Common(1)}, r"optimizer\.lr: expected keys of text without a slash, got the key 3"),
        ({"a/b": Common(1)}, r"optimizer\.lr: .*the key 'a/b'"),
    ],
)
def test_other_leaves_are_refused_with_their_path(tmp_path: Path, leaf: Any, message: str) -> None:
    """A leaf that can't be saved is refused by its key path, and nothing is left behind."""
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "all", 1, {"optimizer": {"lr": leaf}}, **ABOUT)
    assert not (tmp_path / "all").exists()


def test_two_paths_of_one_name_are_refused(tmp_path: Path) -> None:
    """Dots in keys must not make two entries one."""
    tree = {"a": {"b": Common(1)}, "a.b": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"a\.b: expected one entry.*got two, at \['a', 'b'\] and \['a\.b'\]"):
        save(tmp_path, 1, tree, **ABOUT)


def test_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """Config and topology are plain JSON data too."""
    with pytest.raises(CheckpointError, match=r"config\.ranks: expected a JSON value.*tuple"):
        save(tmp_path, 1, {}, config={"ranks": (0, 1)}, topology={})


def test_all_misfits_are_listed_at_once_and_nothing_changes(tmp_path: Path) -> None:
    """Missing names, other shapes, dtypes, kinds and owners come in one error before any tensor is filled."""
    step = saved(tmp_path)
    tree: dict[str, Any] = {
        "vision": {"patch.weight": torch.zeros(7, 5), "norm.weight": torch.zeros(6), "gone": torch.zeros(1)},
        "language": {"norm.weight": torch.zeros(5), "patch.weight": Common(0)},
        "progress": {"step": Owned(0, "vision"), "best": torch.zeros(1), "lost": Common(0)},
        "plugin": {"settings": Owned(0, "language")},
    }
    with pytest.raises(CheckpointError) as caught:
        load(step, tree)
    text = str(caught.value)
    for line in (
        "vision.norm.weight: shape [5] in the checkpoint, [6] here",
        "vision.gone: missing",
        "language.norm.weight: dtype BF16 in the checkpoint, F32 here",
        "language.patch.weight: a tensor in the checkpoint, common here",
        "progress.step: common in the checkpoint, owned by 'vision' here",
        "progress.best: a JSON value in the checkpoint, a tensor here",
        "progress.lost: missing",
        "plugin.settings: owned by 'vision' in the checkpoint, owned by 'language' here",
    ):
        assert f"\n  {line}\n" in text, text
    assert "8 that do not fit" in text
    assert not tree["vision"]["patch.weight"].any()


def test_unexpected_entries_are_ignored_unless_refused(tmp_path: Path) -> None:
    """Loading a part of a checkpoint works; `refuse_left` names what nobody asked for."""
    step = saved(tmp_path)
    target = torch.zeros(5)
    load(step, {"vision": {"norm.weight": target}})
    assert torch.equal(target, make_tree(3)["vision"]["norm.weight"])
    with pytest.raises(CheckpointError, match=r"language\.patch\.weight: unexpected: in the checkpoint, not asked for"):
        load(step, {"vision": {"norm.weight": target}}, refuse_left=True)
    load(step, make_tree(), refuse_left=True)


def test_shards_are_bounded_and_large_tensors_span_blocks(tmp_path: Path) -> None:
    """A file ends before its limit, a tensor larger than it has its own, and ranges over several blocks are read."""
    big = torch.arange(700_000, dtype=torch.float32).reshape(700, 1000)
    tree = {"big": big, **{f"small{i}": torch.full((1000,), float(i)) for i in range(10)}}
    step = save(tmp_path, 1, tree, **ABOUT, shard_bytes=12_000)
    manifest = read_manifest(step)
    assert len(manifest.shards) == 5
    assert len(manifest.shards[manifest.tensors["big"].pieces[0].shard].blocks) == 3
    target = {name: torch.zeros_like(tensor) for name, tensor in tree.items()}
    load(step, target)
    assert_same(target, tree)
    found = verify(step)
    assert (found.tensors, found.shards, found.blocks) == (11, 5, 7)


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving and loading call no unpickler, and every file is safetensors, JSON or the name of a step."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        msg = "pickle was used"
        raise AssertionError(msg)

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    step = saved(tmp_path)
    assert_same(load(step, make_tree()).tree, make_tree(3))
    assert sorted(path.name for path in step.iterdir()) == ["manifest.json", "rank_00000_0000.safetensors"]
    json.loads((step / "manifest.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003"]
    assert (tmp_path / "latest").read_text() == "step_00000003\n"


def damage_spots(step: Path) -> list[tuple[str, int]]:
    """Some bytes of every file and region: length field, header, data at both ends, manifest from end to end."""
    shard, manifest = "rank_00000_0000.safetensors", "manifest.json"
    header = read_manifest(step).shards[shard].header_bytes
    size, length = (step / shard).stat().st_size, (step / manifest).stat().st_size
    return [(shard, at) for at in (0, 7, 8, 40, header - 1, header, header + 57, size - 1)] + [
        (manifest, at) for at in (0, 5, 11, 42, 43, 51, 52, length // 2, length - 3, length - 2, length - 1)
    ]


def test_every_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    """A single flipped bit in any region of any file is refused by verify and by load, naming the file."""
    step = saved(tmp_path)
    assert verify(step).shards == 1
    for name, at in damage_spots(step):
        path = step / name
        whole = path.read_bytes()
        for bit in (0, 6):
            broken = bytearray(whole)
            broken[at] ^= 1 << bit
            path.write_bytes(broken)
            with pytest.raises(CheckpointError, match=name):
                verify(step)
            with pytest.raises(CheckpointError, match=name):
                load(step, make_tree())
        path.write_bytes(whole)
    assert_same(load(step, make_tree()).tree, make_tree(3))


def test_a_damaged_block_is_named_and_others_still_load(tmp_path: Path) -> None:
    """Errors say which block of which file; what lies in other blocks can be loaded."""
    step = save(tmp_path, 1, {"a": torch.zeros(1 << 18), "b": torch.ones(1 << 18)}, **ABOUT)
    path = step / "rank_00000_0000.safetensors"
    broken = bytearray(path.read_bytes())
    broken[-5] ^= 16
    path.write_bytes(broken)
    with pytest.raises(CheckpointError, match=r"1 damaged:\n  .*rank_00000_0000\.safetensors block 1: expected the ch"):
        verify(step)
    with pytest.raises(CheckpointError, match=r"rank_00000_0000\.safetensors block 1: expected the checksum"):
        load(step, {"b": torch.zeros(1 << 18)})
    load(step, {"a": torch.ones(1 << 18)})


@pytest.mark.parametrize("name", ["rank_00000_0000.safetensors", "manifest.json"])
@pytest.mark.parametrize("cut", ["empty", "half", "last", "longer", "gone", "link", "folder", "pipe"])
def test_truncated_and_strange_files_are_named_and_nothing_changes(tmp_path: Path, name: str, cut: str) -> None:
    """Files that are cut, longer, missing or no plain files are refused before a tensor is filled."""
    step = saved(tmp_path)
    path = step / name
    whole = path.read_bytes()
    path.unlink()
    if cut == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    elif cut == "folder":
        path.mkdir()
    elif cut == "pipe":
        os.mkfifo(path)
    elif cut != "gone":
        path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "last": whole[:-1]}.get(cut, whole + b"\0"))
    tree = make_tree(9)
    for act in (lambda: verify(step), lambda: load(step, tree)):
        with pytest.raises(CheckpointError, match=name):
            act()
    assert_same(tree, make_tree(9))


def test_a_second_file_that_is_cut_changes_nothing(tmp_path: Path) -> None:
    """All files that are needed are looked at before the first tensor is filled."""
    step = save(tmp_path, 1, {"a": torch.ones(8), "b": torch.ones(8)}, **ABOUT, shard_bytes=32)
    (step / "rank_00000_0001.safetensors").unlink()
    tree = {"a": torch.zeros(8), "b": torch.zeros(8)}
    with pytest.raises(CheckpointError, match=r"rank_00000_0001\.safetensors: expected a shard of the checkpoint"):
        load(step, tree)
    assert not tree["a"].any()
    load(step, {"a": tree["a"]})
    assert tree["a"].all()


def test_swapped_shards_are_found(tmp_path: Path) -> None:
    """Two files of equal size and header in each other's place are noticed."""
    for step, value in ((1, 0.0), (2, 1.0)):
        save(tmp_path, step, {"x": torch.full((8,), value)}, **ABOUT)
    name = "rank_00000_0000.safetensors"
    (tmp_path / "step_00000001" / name).write_bytes((tmp_path / "step_00000002" / name).read_bytes())
    with pytest.raises(CheckpointError, match="block 0: expected the checksum"):
        load(tmp_path / "step_00000001", {"x": torch.zeros(8)})


def test_ordered_mappings_are_trees_too(tmp_path: Path) -> None:
    """Any mapping is a branch; what comes back is nested dicts."""
    step = save(tmp_path, 1, OrderedDict(a=OrderedDict(b=Common(1)), empty={}), **ABOUT)
    assert load(step, OrderedDict(a=OrderedDict(b=Common(0)), empty={})).tree == {"a": {"b": Common(1)}, "empty": {}}


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    """A step whose folder would not be found again, and a `keep` below one."""
    for step in (-1, 10**18):
        with pytest.raises(
            CheckpointError, match=f"checkpoint step: expected a whole number of at most 18 digits, got {step}"
        ):
            save(tmp_path, step, {}, **ABOUT)
    with pytest.raises(CheckpointError, match=r"checkpoint\.keep: expected at least 1, got 0\. Leave it out"):
        save(tmp_path, 1, {}, **ABOUT, keep=0)
    assert latest(tmp_path) is None


def test_a_manifest_that_no_reader_takes_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is as large as readers take is, and loads."""
    step = save(tmp_path, 1, {"x": Common("x" * 1000)}, **ABOUT)
    size = (step / "manifest.json").stat().st_size
    monkeypatch.setattr(_manifest_file, "_LARGEST_MANIFEST_BYTES", size)
    read_manifest(save(tmp_path, 2, {"x": Common("x" * 1000)}, **ABOUT))
    with pytest.raises(CheckpointError, match=rf"manifest\.json: expected at most {size} bytes, got {size + 1}"):
        save(tmp_path, 3, {"x": Common("x" * 1001)}, **ABOUT)
    assert latest(tmp_path) == tmp_path / "step_00000002"
