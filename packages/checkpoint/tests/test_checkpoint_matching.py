"""What is asked for against what is there: other names, entries that may lack, entries that may be left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.checkpoint import load, save
from mimo.hooks import CheckpointError, Common, Owned

ABOUT: dict[str, Any] = {"config": {}, "topology": {}}
RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]


def saved(folder: Path) -> Path:
    """Save two modules, state of one's optimizer, and JSON values."""
    tree = {
        "vision": {"patch.weight": torch.full((3,), 1.0), "norm.weight": torch.full((3,), 2.0)},
        "visionary": {"weight": torch.full((3,), 3.0)},
        "optimizer": {"vision": {"patch.weight": {"exp_avg": torch.full((3,), 4.0)}, "lr": Owned(5, "vision")}},
        "progress": {"step": Common(6)},
    }
    return save(folder, 1, tree, **ABOUT)


def blank() -> torch.Tensor:
    """Make a target."""
    return torch.zeros(3)


def test_prefixes_are_renamed_the_longest_first(tmp_path: Path) -> None:
    """Whole keys are renamed, below the longest prefix given, and a renamed owner keeps its values."""
    tree: Any = {
        "eye": {"patch.weight": blank(), "last.weight": blank()},
        "visionary": {"weight": blank()},
        "optimizer": {"eye": {"patch.weight": {"exp_avg": blank()}, "lr": Owned(0, "eye")}},
    }
    names = {"eye": "vision", "eye.last": "vision.norm", "optimizer.eye": "optimizer.vision"}
    loaded = load(saved(tmp_path), tree, rename=names)
    assert tree["eye"]["patch.weight"].unique().tolist() == [1.0]
    assert tree["eye"]["last.weight"].unique().tolist() == [2.0]
    assert tree["visionary"]["weight"].unique().tolist() == [3.0]
    assert tree["optimizer"]["eye"]["patch.weight"]["exp_avg"].unique().tolist() == [4.0]
    found: Any = loaded.tree
    assert found["optimizer"]["eye"]["lr"] == Owned(5, "eye")
    assert not loaded.lacking
    assert loaded.left == {"progress.step"}


def test_what_may_lack_keeps_what_it_holds(tmp_path: Path) -> None:
    """Tensors and values that only this run has stay as they are and are listed; others are still missing."""
    step = saved(tmp_path)
    tree: Any = {
        "vision": {"patch.weight": blank(), "head.weight": torch.full((2,), 7.0)},
        "progress": {"step": Common(0), "tokens": Common(8)},
    }
    loaded = load(step, tree, may_lack=["vision.head.*", "progress.*"])
    assert tree["vision"]["patch.weight"].unique().tolist() == [1.0]
    assert tree["vision"]["head.weight"].unique().tolist() == [7.0]
    assert loaded.tree["progress"] == {"step": Common(6), "tokens": Common(8)}
    assert loaded.lacking == {"vision.head.weight", "progress.tokens"}
    with pytest.raises(CheckpointError, match=r"1 that do not fit:\n  progress\.tokens: missing\n"):
        load(step, tree, may_lack=["vision.head.*"])


def test_what_may_lack_must_fit_where_it_is_there(tmp_path: Path) -> None:
    """A pattern lets an entry be missing, not have another shape."""
    with pytest.raises(CheckpointError, match=r"vision\.norm\.weight: shape \[3\] in the checkpoint, \[4\] here"):
        load(saved(tmp_path), {"vision": {"norm.weight": torch.zeros(4)}}, may_lack=["*"])


def test_names_that_nothing_takes_are_listed_and_refused_on_request(tmp_path: Path) -> None:
    """`left` holds every name that nobody asked for; `refuse_left` refuses all but those that may be left."""
    step = saved(tmp_path)
    tree: Any = {"vision": {"patch.weight": blank(), "norm.weight": blank()}, "progress": {"step": Common(0)}}
    moments = {"optimizer.vision.patch.weight.exp_avg", "optimizer.vision.lr"}
    assert load(step, tree).left == {"visionary.weight", *moments}
    found = load(step, tree, refuse_left=True, may_leave=["optimizer.*", "visionary.*"])
    assert found.left == {"visionary.weight", *moments}
    tree["vision"]["patch.weight"].zero_()
    with pytest.raises(
        CheckpointError, match=r"1 that do not fit:\n  visionary\.weight: unexpected: in the checkpoint"
    ):
        load(step, tree, refuse_left=True, may_leave=["optimizer.*"])
    assert not tree["vision"]["patch.weight"].any()


def test_all_that_is_wrong_with_names_comes_in_one_error(tmp_path: Path) -> None:
    """Useless renames, two names for one entry, missing and unexpected ones are listed together, nothing is filled."""
    tree: Any = {
        "eye": {"patch.weight": blank(), "gone": blank()},
        "vision": {"patch.weight": blank(), "norm.weight": torch.zeros(4)},
        "optimizer": {"eye": {"lr": Owned(0, "ear")}},
    }
    names = {"eye": "vision", "optimizer.eye": "optimizer.vision", "ear": "audio", "ey": "x"}
    with pytest.raises(CheckpointError) as caught:
        load(saved(tmp_path), tree, rename=names, refuse_left=True, may_leave=["optimizer.vision.patch.*"])
    text = str(caught.value)
    assert "8 that do not fit" in text
    for line in (
        "eye.gone: missing (there: vision.gone)",
        "vision.norm.weight: shape [3] in the checkpoint, [4] here",
        "vision.patch.weight: asked for under several names: eye.patch.weight, vision.patch.weight",
        "optimizer.eye.lr: owned by 'vision' in the checkpoint, owned by 'ear' here (there: optimizer.vision.lr)",
        "rename 'ear': no name that is asked for begins so",
        "rename 'ey': no name that is asked for begins so",
        "visionary.weight: unexpected: in the checkpoint, not asked for",
        "progress.step: unexpected: in the checkpoint, not asked for",
    ):
        assert f"\n  {line}\n" in text, text
    assert not tree["vision"]["patch.weight"].any()
    assert not tree["eye"]["patch.weight"].any()


def test_names_are_matched_over_all_ranks(tmp_path: Path, run_ranks: RunRanks) -> None:
    """A rename may fit names of another rank only, and two ranks must not ask for one entry under two names."""
    saved(tmp_path)
    step = tmp_path / "step_00000001"

    def work(rank: int) -> Any:
        tree: Any = {"eye" if rank else "visionary": {"weight" if not rank else "patch.weight": blank()}}
        loaded = load(step, {**tree, f"new{rank}": Common(rank)}, rename={"eye": "vision"}, may_lack=["new*"])
        assert loaded.tree[f"new{rank}"] == Common(rank)
        with pytest.raises(CheckpointError, match=r"2 that do not fit:\n  rename 'nose': no name.*\n  vision\.patch"):
            load(step, {f"eye{rank}": {"patch.weight": blank()}}, rename={f"eye{rank}": "vision", "nose": "x"})
        return loaded.lacking, loaded.left

    first, second = run_ranks(2, work)
    left = {"vision.norm.weight", "optimizer.vision.patch.weight.exp_avg", "optimizer.vision.lr", "progress.step"}
    assert first == second == ({"new0", "new1"}, left)
