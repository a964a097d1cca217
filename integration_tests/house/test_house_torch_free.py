"""What must answer fast stays free of torch: planning packages, the discovery of plugins, the help of the command."""

from __future__ import annotations

import subprocess
import sys

import pytest
from house import rooms

SPEC_PACKAGES = ["hooks", "topology", "schedule", "model", "optimizer", "data"]
LEAVE = "import sys; found = sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy', 'transformers'})"


def heavy_modules(code: str) -> list[str]:
    """Return which heavy libraries a fresh interpreter has imported after running ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{LEAVE}\nprint('\\n' + ' '.join(found))"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("package", SPEC_PACKAGES)
def test_house_package_imports_no_torch(package: str) -> None:
    """Importing a package that defines specs leaves torch alone."""
    assert "torch" not in heavy_modules(f"import mimo.{package}")


@pytest.mark.parametrize("package", ["hooks", "topology", "schedule"])
def test_house_planning_imports_no_numpy(package: str) -> None:
    """What plans for ten thousand ranks on a laptop needs no arrays either."""
    assert not heavy_modules(f"import mimo.{package}")


@pytest.mark.parametrize(
    ("name", "group", "module"),
    [
        (name, group, value.partition(":")[0])
        for room in rooms()
        for group, named in sorted(room.project.get("entry-points", {}).items())
        for name, value in sorted(named.items())
    ],
)
def test_house_registering_imports_no_torch(name: str, group: str, module: str) -> None:
    """A plugin of ours registers without torch; building imports it."""
    assert "torch" not in heavy_modules(f"import {module}"), f"{group}: {name}"


def test_house_plugins_are_all_usable() -> None:
    """Every plugin in this environment loads, and all of them together without torch."""
    code = """
from mimo.data import DATASETS, TOKENIZERS
from mimo.hooks import PluginFailure, survey
from mimo.model import ENCODERS, LANGUAGE_MODELS
from mimo.optimizer import OPTIMIZERS
from mimo.schedule import SCHEDULES

rows = survey([ENCODERS, LANGUAGE_MODELS, OPTIMIZERS, SCHEDULES, DATASETS, TOKENIZERS])
failed = [str(row.error) for row in rows if isinstance(row, PluginFailure)]
assert rows and not failed, failed
"""
    assert "torch" not in heavy_modules(code)


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_house_command_answers_without_torch(argument: str) -> None:
    """The command's help must not wait for torch."""
    (target,) = [room.project["scripts"]["mimo"] for room in rooms() if "mimo" in room.project.get("scripts", {})]
    module, _, function = target.partition(":")
    code = f"""
import sys
from {module} import {function}

sys.argv = ["mimo", {argument!r}]
try:
    {function}()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert "torch" not in heavy_modules(code)
