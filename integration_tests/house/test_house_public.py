"""What programs outside of the trainer import of it: public names, and what a list names that may only shrink."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from house import ROOT, imported_modules
from test_house_rooms import named

TRAINER = ROOT / "packages" / "trainer"
PUBLIC = ("", "generation", "runtime")
"""Public modules of `mimo.trainer`, see docs/architecture.md; the empty one is the package."""
COMMAND = "mimo.trainer.commands.main.run"
"""The command as a function, which tests call with the words that a user types."""
PROGRAMS = ("integration_tests", "benchmarks", "gpu", "examples", "docs", "packages/*/tests", "plugins")
INSIDE: Mapping[str, str] = {
    "gpu/_faults.py": "resume run",
    "integration_tests/commands/killing.py": "run",
    "integration_tests/commands/test_check_plugins.py": "commands",
    "integration_tests/commands/test_commands_refused.py": "run",
    "integration_tests/engine/test_continuity.py": "resume",
    "integration_tests/engine/test_edge_traffic.py": "commands",
    "integration_tests/engine/test_edges.py": "run",
    "integration_tests/engine/test_memory_estimate.py": "commands",
    "integration_tests/engine/test_rerun_machine.py": "rerun step",
    "integration_tests/engine/test_rerun_passes.py": "rerun step",
    "integration_tests/engine/test_saving.py": "report",
    "integration_tests/published/test_lora_checkpoints.py": "resume",
    "integration_tests/support/truth.py": "step",
}
"""Rooms of the trainer inside of which a program looks all the same, or replaces something."""


def public_names() -> set[str]:
    """Return what everybody may import, with the modules."""
    home = TRAINER / "src" / "mimo" / "trainer"
    names = {COMMAND}
    for module in PUBLIC:
        file = home / (f"{module}.py" if module else "__init__.py")
        prefix = f"mimo.trainer.{module}" if module else "mimo.trainer"
        names |= {prefix, *(f"{prefix}.{name}" for name in named(file))}
    return names


def inside(tree: ast.AST, file: Path, public: set[str]) -> Iterator[str]:
    """Yield the rooms of the trainer from which a program imports what is not public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported_modules(node, file):
                if name.startswith("mimo.trainer.") and name not in public:
                    yield name.split(".")[2]


def test_house_programs_import_public_names_of_the_trainer() -> None:
    """Tests of whole jobs, benchmarks and other programs get by with what any program has; but for those listed."""
    public, found = public_names(), {}
    for path in (path for pattern in PROGRAMS for folder in ROOT.glob(pattern) for path in folder.rglob("*.py")):
        if not path.is_relative_to(TRAINER) and ".nox" not in path.parts:
            entered = set(inside(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT), public))
            if entered:
                found[path.relative_to(ROOT).as_posix()] = " ".join(sorted(entered))
    assert found == INSIDE


def test_house_scan_of_programs_can_fail() -> None:
    """It sees a module and a name that are not public, within functions too, and lets pass those that are."""
    program = "from mimo.trainer import train, nothing\ndef f():\n    from mimo.trainer.run.begin import resolve_run\n"
    assert list(inside(ast.parse(program), Path("a.py"), public_names())) == ["nothing", "run"]
