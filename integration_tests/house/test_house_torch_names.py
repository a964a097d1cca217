"""Names of torch that our sources use are those that were looked up in the oldest releases that we accept."""

from __future__ import annotations

import ast
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_house_collectives import BY_RELEASE
from torch_names import FILE, FOUND, MISSING, UNKNOWN, Wheel, all_names_used, names_used

RELEASES = ("2.11.0", "2.12.0")
TABLE: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))


def test_house_names_of_torch_have_been_looked_up() -> None:
    """A name or keyword that is new in our sources is looked up in the wheels before it lands."""
    known = {name: set(row["keywords"]) for name, row in TABLE.items()}
    new = {name: words for name, words in all_names_used().items() if not known.get(name, set()) >= {*words}}
    new |= {name: [] for name in all_names_used().keys() - known.keys()}
    assert not new, "look them up in the wheels: python integration_tests/house/torch_names.py WHEEL WHEEL"


@pytest.mark.parametrize("release", RELEASES)
def test_house_names_that_a_release_lacks_are_met(release: str) -> None:
    """Whatever is missing there is used in the one place that does without, and no keyword is."""
    missing = {name.rpartition(".")[2] for name, row in TABLE.items() if row[release]["name"] != FOUND}
    assert missing <= {name for names in BY_RELEASE.values() for name in names}
    assert not {name: row for name, row in TABLE.items() if MISSING in row[release]}


def test_house_names_are_seen_however_they_are_imported() -> None:
    """Aliases, parts of modules, what a call gives by keyword; nothing of others, and no object's own members."""
    source = """
import torch.distributed as dist, torch, numpy
from torch import nn
from torch.nn import functional as F
from torch.distributed.tensor import DTensor
dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
class Mine(nn.Module):
    pass
x = F.pad(torch.zeros(1, device="cpu").view(-1), (0, 1), value=1.0)
x.transpose(dim=1), numpy.ones(shape=1), isinstance(x, DTensor)
"""
    assert names_used(ast.parse(source)) == {
        "torch.distributed.all_reduce": {"op", "group"},
        "torch.distributed.ReduceOp.SUM": set(),
        "torch.nn.Module": set(),
        "torch.nn.functional.pad": {"value"},
        "torch.zeros": {"device"},
        "torch.distributed.tensor.DTensor": set(),
    }


FILES = {
    "torch/__init__.py": "from math import inf\nfrom torch import nn as nn\nif TYPE:\n    from torch._C import *\n",
    "torch/_C/__init__.pyi": "class dtype:\n    itemsize: int\nhalf: dtype\n"
    "def zeros(size, *, device=None): ...\ndef zeros(shape, *, names): ...\n",
    "torch/nn/__init__.py": "from .modules import *\nfrom torch.circle import far\n",
    "torch/nn/modules.py": "class Base:\n    def __init__(self, width, **others):\n        self.width = width\n"
    "class Linear(Base):\n    pass\nlinear = Linear\nopaque = bind(Linear)\n",
    "torch/circle.py": "from torch.nn import *\nraise SystemExit('nothing is run')\n",
}


@pytest.mark.parametrize(
    ("name", "keywords", "answer"),
    [
        ("torch.zeros", ["device", "names"], {"name": FOUND}),
        ("torch.zeros", ["device", "pinned"], {"name": FOUND, MISSING: ["pinned"]}),
        ("torch.ones", [], {"name": MISSING}),
        ("torch.inf", [], {"name": FOUND}),
        ("torch.__file__", [], {"name": FOUND}),
        ("torch.half.itemsize", [], {"name": FOUND}),
        ("torch.half.bits", [], {"name": MISSING}),
        ("torch.nn.Linear", ["width", "anything"], {"name": FOUND}),
        ("torch.nn.Linear.width", [], {"name": FOUND}),
        ("torch.nn.linear", ["width"], {"name": FOUND}),
        ("torch.nn.opaque", ["width"], {"name": FOUND, UNKNOWN: ["width"]}),
        ("torch.nn.far", [], {"name": MISSING}),
        ("torch.ops.aten.add", [], {"name": UNKNOWN}),
    ],
)
def test_house_names_are_found_in_a_wheel(tmp_path: Path, name: str, keywords: list[str], answer: Any) -> None:
    """In modules, stubs, classes and their bases, through stars and circles; without a stub nothing is known of C++."""
    path = tmp_path / "torch-2.0.1-cp312-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in FILES.items():
            archive.writestr(file, text)
    wheel = Wheel(path)
    assert wheel.version == "2.0.1"
    assert wheel.answer(name, keywords) == answer
