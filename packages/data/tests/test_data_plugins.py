"""Registration: what this package ships is found as a stranger's plugin would be, and torch stays out."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pluggy
import pytest

from mimo.data import ANSWER_METRICS, DATASETS, TOKENIZERS
from mimo.hooks import Kind


@pytest.mark.parametrize(
    ("kind", "entry", "names"),
    [
        (ANSWER_METRICS, "builtin", ["exact", "normalised", "contains"]),
        (DATASETS, "jsonl", ["jsonl"]),
        (DATASETS, "mixture", ["mixture"]),
        (DATASETS, "mock", ["mock"]),
        (TOKENIZERS, "builtin", ["word", "byte", "file"]),
    ],
)
def test_data_ships_plugins(kind: Kind[Any], entry: str, names: list[str]) -> None:
    """Each entry point loads a module whose hook is specified and returns the kind's specs."""
    manager = pluggy.PluginManager("mimo")
    manager.add_hookspecs(kind.hookspecs)
    manager.register(entry_points(group=kind.group)[entry].load())
    manager.check_pending()
    (specs,) = getattr(manager.hook, kind.hook)()
    assert [spec.name for spec in specs] == names
    assert all(isinstance(spec, kind.spec) for spec in specs)


def test_data_stays_free_of_torch() -> None:
    """Importing the package and its plugins imports neither torch nor what only building needs."""
    check = (
        "import sys, mimo.data, mimo.data.sources.jsonl, mimo.data.sources.mixture, mimo.data.text.tokenizers\n"
        "print(sorted({'torch', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)  # noqa: S603 - own text
    assert done.stdout == "[]\n"


def test_data_readme_examples_run(tmp_path: Path) -> None:
    """The README's examples run as they stand and print what it says."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        promised = "".join(f"{line}\n" for line in re.findall(r"^print.*  # (.*)$", example, flags=re.MULTILINE))
        done = subprocess.run(  # noqa: S603 - own text
            [sys.executable, "-c", example], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert (done.stderr, done.stdout) == ("", promised)
