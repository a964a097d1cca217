"""What ranks say to each other: by names that every release of torch has, and never pickled."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

import pytest
from house import ROOT, Room, nodes_of, rooms

BY_RELEASE = {
    "packages/topology/src/mimo/topology/collectives.py": {
        *("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"),
    },
    "packages/model/src/mimo/model/layers/cpu_linear.py": {"mkldnn", "_linear_pointwise"},
    "plugins/optimizer-distributed/src/mimo_optimizer_distributed/_fsdp.py": {
        *("_fsdp_param_group", "_fsdp_param_groups"),
    },
}
"""Names that not all of torch 2.11 to 2.13 have, by the one file that may use them of torch."""


def used(tree: ast.Module, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name where an attribute of any object has one of these names, or torch's is imported."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in names)


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_what_releases_of_torch_call_differently_has_one_place(room: Room) -> None:
    """Names that came or went between releases of torch are used by one file each, which meets them all."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in room.trees()
        for place, names in BY_RELEASE.items()
        if path != ROOT / place
        for line, name in used(tree, names)
    ]
    assert not wrong


def test_house_guard_against_names_of_one_release_can_fail() -> None:
    """The guard sees attributes and imports, and lets our own function of that name pass."""
    names = {name for found in BY_RELEASE.values() for name in found}
    assert list(used(ast.parse("dist.all_gather_single(a, b)"), names)) == [(1, "all_gather_single")]
    assert list(used(ast.parse("from torch.distributed import reduce_scatter_tensor"), names))
    ours = "from mimo.topology.collectives import all_gather_single\nall_gather_single(a, b)"
    assert not list(used(ast.parse(ours), names))
    for place, found in BY_RELEASE.items():
        tree = ast.parse((ROOT / place).read_text(encoding="utf-8"))
        assert {name for _, name in used(tree, found)} == found, place


PICKLING = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "_object_to_tensor", "_tensor_to_object"),
    *("FileSystemWriter", "FileSystemReader", "async_save", "dcp_to_torch_save", "torch_save_to_dcp"),
}
"""What of `torch.distributed` pickles what it is given, or unpickles what it gets or reads."""
PICKLING_MODULES = ("torch.distributed.rpc", "torch.distributed.checkpoint.filesystem")
SAVING = {"torch.distributed.checkpoint.save", "torch.distributed.checkpoint.load"}


def pickled(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of whatever would pickle between ranks."""
    yield from used(tree, PICKLING)
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            if module in SAVING or any(f"{module}.".startswith(f"{name}.") for name in PICKLING_MODULES):
                yield node.lineno, module


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_house_ranks_send_each_other_no_pickles(room: Room) -> None:
    """What arrives from another rank is a tensor or JSON, never code."""
    wrong = [f"{path.relative_to(ROOT)}:{line}: {name}" for path, tree in room.trees() for line, name in pickled(tree)]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "from torch.distributed.checkpoint import save",
        "import torch.distributed.rpc",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader as R",
        "import torch.distributed.checkpoint.save as s",
    ],
)
def test_house_guard_against_pickles_between_ranks_can_fail(source: str) -> None:
    """The guard sees each way, and lets the planners and our own words pass."""
    assert list(pickled(ast.parse(source)))
    assert not list(pickled(ast.parse("from torch.distributed.checkpoint.planner import SavePlan\nall_gather_json(x)")))
