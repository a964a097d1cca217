"""What is run on the whole repository. Every fact about a package is read from its pyproject.toml.

``tests`` proves that each package and plugin works with what it declares alone; the other sessions install all. Where
no session is named, several run at once, each in a process of nox's own that shows its output when it has ended.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nox
from nox.project import dependency_groups
from packaging.requirements import Requirement

nox.needs_version = ">=2026.10.20"  # which runs sessions side by side
nox.options.default_venv_backend = "uv|virtualenv"

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
PROGRAMS = ("integration_tests", "benchmarks", "gpu")
"""Folders of programs that import what lies beside them."""
TEST_TOOLS = "mimo-testing"
"""The member that any tests may use; it brings nothing else along."""
WORKERS = 1 + (os.cpu_count() or 1)
"""Processes that test: one more than there are cores, as ranks of a test wait for each other, and no core should.

With one more than that, a test of four ranks takes a tenth more processor time: a rank that waits for a core may hold a
lock, at which one of gloo's threads then spins.
"""
if not {"-s", "--session", "--sessions"}.intersection(sys.argv):
    nox.options.parallel = WORKERS  # of a session that is named one wants to see each line as it comes
WORKSPACE: dict[str, Any] = nox.project.load_toml(ROOT / "pyproject.toml")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A package or plugin of this repository, as its pyproject.toml describes it."""

    folder: Path
    name: str
    dependencies: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]
    testing: tuple[str, ...]

    def requirements(self, extras: Iterable[str]) -> list[Requirement]:
        """Return what it needs when installed with these extras."""
        return [*self.dependencies, *(requirement for extra in extras for requirement in self.extras[extra])]


def read_member(folder: Path) -> Member:
    """Return the member of a folder."""
    contents = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    project = contents["project"]
    return Member(
        folder=folder,
        name=project["name"],
        dependencies=tuple(map(Requirement, project.get("dependencies", ()))),
        extras={
            extra: tuple(map(Requirement, requirements))
            for extra, requirements in project.get("optional-dependencies", {}).items()
        },
        testing=tuple(contents.get("dependency-groups", {}).get("test", ())),
    )


FOLDERS = [
    folder for pattern in WORKSPACE["tool"]["uv"]["workspace"]["members"] for folder in sorted(ROOT.glob(pattern))
]
MEMBERS: Mapping[str, Member] = {
    member.name: member for member in map(read_member, (folder for folder in FOLDERS if folder.is_dir()))
}


def closure(wanted: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return the members, each with its extras, that the wanted members need, themselves included."""
    found: dict[str, frozenset[str]] = {}
    open_ends = list(wanted.items())
    while open_ends:
        name, extras = open_ends.pop()
        if name in found and extras <= found[name]:
            continue
        found[name] = found.get(name, frozenset()) | extras
        open_ends += [
            (requirement.name, frozenset(requirement.extras))
            for requirement in MEMBERS[name].requirements(found[name])
            if requirement.name in MEMBERS
        ]
    return dict(sorted(found.items()))


def needs(members: Mapping[str, frozenset[str]], distribution: str) -> bool:
    """Return whether one of these members asks for a distribution from outside."""
    requirements = (one for name, extras in members.items() for one in MEMBERS[name].requirements(extras))
    return any(requirement.name == distribution for requirement in requirements)


def install(
    session: nox.Session, members: Mapping[str, frozenset[str]], *groups: str, tested: Iterable[str] = ()
) -> None:
    """Install members and dependency groups in one command, so that the pinned torch counts for all of them.

    Every member is named by its folder: nothing of ours comes from an index. With the members in ``tested`` comes what
    their own tests need beyond the groups.
    """
    if "PIP_FIND_LINKS" in os.environ:
        session.env.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))
    session.env["OMP_NUM_THREADS"] = "1"  # many processes share few cores, and sums keep their order
    session.env["PYTHONDONTWRITEBYTECODE"] = ""  # else each process that imports torch compiles it, for six seconds
    session.env["UV_LINK_MODE"] = "hardlink"  # so that a file has one time in all environments, see `bytecode`
    lines = [
        f"-e {MEMBERS[name].folder.as_uri()}" + (f"[{','.join(sorted(extras))}]" if extras else "")
        for name, extras in members.items()
    ]
    # uv builds a package that a file names once, and one that its command line names each time.
    file = Path(session.virtualenv.location) / "members.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    testing = [requirement for name in tested for requirement in MEMBERS[name].testing]
    session.install("-c", str(CONSTRAINTS), "-r", str(file), *dependency_groups(WORKSPACE, *groups), *testing)


def collect_rarely(session: nox.Session) -> None:
    """Have every interpreter of an environment look for garbage rarely: an import of torch makes objects, and none.

    For tests, which start many; what is measured runs as it does for users.
    """
    rarely = "import gc; gc.set_threshold(100_000, 20, 50)\n"
    (packages_of(session) / "garbage.pth").write_text(rarely, encoding="utf-8")


def packages_of(session: nox.Session) -> Path:
    """Return where the packages of an environment lie."""
    (packages,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    return packages


def files_of(folder: Path, but: Iterable[Path] = ()) -> set[Path]:
    """Return the files of tests in a folder, without those of some folders in it."""
    return set(folder.rglob("test_*.py")) - {path for one in but for path in one.rglob("test_*.py")}


def side_by_side(files: Iterable[Path]) -> tuple[str, ...]:
    """Return how tests run on all cores; a process imports much, so there are no more than files."""
    workers = min(WORKERS, len(set(files)))
    return ("--numprocesses", str(workers if workers > 1 else 0), "--dist", "worksteal")


@contextmanager
def bytecode(session: nox.Session) -> Iterator[None]:
    """Share what is compiled with the environments of other sessions, which have the same files.

    Python compares a source's time and size with those of which its bytecode was made.
    """
    packages = packages_of(session)
    shared = session.cache_dir / "bytecode" / packages.parent.name
    link_bytecode(shared, packages, of=packages)
    try:
        yield
    finally:
        link_bytecode(packages, shared, of=packages)


def link_bytecode(source: Path, target: Path, *, of: Path) -> None:
    """Link the bytecode that lies in one folder into another, of those packages that a third one has."""
    for path in source.rglob("__pycache__/*.pyc"):
        place = target / path.relative_to(source)
        if (of / path.relative_to(source)).parents[1].is_dir() and not (place.exists() and place.samefile(path)):
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_suffix(f".{os.getpid()}")  # another session may link the same one now
            part.hardlink_to(path)
            part.replace(place)
            part.unlink(missing_ok=True)  # where that one was linked first


def everything() -> dict[str, frozenset[str]]:
    """Return all members with all their extras."""
    return closure({name: frozenset(member.extras) for name, member in MEMBERS.items()})


def tests_of(member: Member, extra: str | None) -> tuple[Path, list[Path]]:
    """Return a folder of tests and those in it that are left out: with an extra its own folder, bare all the others."""
    folder = member.folder / "tests" / (extra or "")
    return folder, [] if extra else [folder / one for one in member.extras]


def variants() -> list[Any]:
    """Return each member bare, and with each extra that it has: ``topology``, ``topology[torch]``.

    Those with the most files come first, so that none is left to run alone at the end.
    """
    found = [(name, extra) for name, member in MEMBERS.items() for extra in (None, *member.extras)]
    return [
        nox.param(name, extra, id=MEMBERS[name].folder.name + (f"[{extra}]" if extra else ""))
        for name, extra in sorted(found, key=lambda one: -len(files_of(*tests_of(MEMBERS[one[0]], one[1]))))
    ]


BRINGING = {"numpy": ("matplotlib", "tensorboard", "transformers")}
"""Libraries that install others which members then need not declare."""


def guard_of(members: Mapping[str, frozenset[str]], *, absent: Iterable[str]) -> str:
    """Return a program that fails where an environment holds other members, or modules that none of them declares."""
    lines = [
        "from importlib import metadata, util",
        "ours = sorted({d.name for d in metadata.distributions() if d.name.startswith('mimo-')})",
        f"assert ours == {sorted(members)!r}, f'not the declared closure: {{ours}}'",
        *(
            f"assert util.find_spec('{module}') is None, '{module} came with a package that declares none'"
            for module in absent
            if not any(needs(members, library) for library in (module, *BRINGING.get(module, ())))
        ),
    ]
    return "\n".join(lines)


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Check style, format and types of everything, tests included."""
    install(session, everything(), "lint", tested=MEMBERS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = [str(folder / "src") for folder in FOLDERS]
    others = [*(folder / "tests" for folder in FOLDERS), *(ROOT / folder for folder in PROGRAMS)]
    programs = [str(folder) for folder in others if any(folder.rglob("*.py"))]
    session.run("mypy", *sources, *programs, "conftest.py", "noxfile.py", env={"MYPYPATH": os.pathsep.join(sources)})


OLDEST = (("mimo-transformers", "transformers"),)
"""Members that are tested with the oldest release of a library that they allow, as some machines have no other."""


@nox.session(allow_parallel=True)
@nox.parametrize(("name", "library"), [nox.param(*one, id=one[1]) for one in OLDEST])
def oldest(session: nox.Session, name: str, library: str) -> None:
    """Test one package with the oldest release that it allows of a library, but for what follows from other tests."""
    install(session, {TEST_TOOLS: frozenset[str](), **closure({name: frozenset()})}, "test", tested=(name,))
    install_lowest(session, name, library)
    collect_rarely(session)
    folder = MEMBERS[name].folder / "tests"
    with bytecode(session):
        how = side_by_side([] if session.parallel else files_of(folder))
        session.run("pytest", str(folder), "-m", "not soak and not newest", *how)


@nox.session(name="oldest(published)", allow_parallel=True)
def oldest_published(session: nox.Session) -> None:
    """Train whole published models as the oldest release of transformers does, and have it load what comes out."""
    install(session, everything(), "integration")
    install_lowest(session, "mimo-transformers", "transformers")
    collect_rarely(session)
    file = "integration_tests/published/test_whole_models.py"
    with bytecode(session):
        session.run("pytest", file, "-k", "tuned_model", "--numprocesses", "0", *session.posargs)


def install_lowest(session: nox.Session, name: str, library: str) -> None:
    """Exchange a library for the oldest release that a member allows."""
    (allowed,) = (one for one in MEMBERS[name].dependencies if one.name == library)
    (lowest,) = (one.version for one in allowed.specifier if one.operator == ">=")
    session.install(f"{library}=={lowest}.*")


@nox.session(allow_parallel=True)
@nox.parametrize(("name", "extra"), variants())
def tests(session: nox.Session, name: str, extra: str | None) -> None:
    """Test one package in an environment that holds only its declared closure.

    Tests that need an extra lie in ``tests/<extra>/``; the session with that extra runs these, the bare one the rest.
    """
    member = MEMBERS[name]
    members = closure({name: frozenset((extra,) if extra else ())})
    brings_more = bool(member.testing) and not extra  # `transformers` and `ortools` need numpy
    installed = {TEST_TOOLS: frozenset[str](), **members}
    install(session, installed, "test", tested=() if extra else (name,))
    collect_rarely(session)
    session.run("python", "-c", guard_of(installed, absent=("torch",) if brings_more else ("torch", "numpy")))
    folder, left_out = tests_of(member, extra)
    files = files_of(folder, left_out)
    how = side_by_side([] if session.parallel else files)  # beside other sessions one process each keeps all cores busy
    how = (*how, *(f"--ignore={path}" for path in left_out), *session.posargs)
    with bytecode(session):
        session.run("pytest", str(folder), *how)


@nox.session
def integration(session: nox.Session) -> None:
    """Test all packages together, and the rules of the house."""
    install(session, everything(), "integration")
    collect_rarely(session)
    with bytecode(session):
        session.run(
            "pytest", "integration_tests", *side_by_side(files_of(ROOT / "integration_tests")), *session.posargs
        )


@nox.session(default=False, venv_backend="none")
def affected(session: nox.Session) -> None:
    """Run the sessions that a change since a revision can reach, by default since it left main: ``-- REVISION``."""
    program = ("integration_tests/house/affected.py", *session.posargs)
    names = str(session.run(sys.executable, *program, silent=True, external=True)).split()
    session.log(f"reached: {', '.join(names) or 'none'}")
    for name in names:
        session.notify(name, posargs=())


def run_beside_tests(session: nox.Session, program: str) -> None:
    """Run a program of the integration tests, which imports what lies beside any of them."""
    folders = os.pathsep.join(str(folder) for folder in sorted(ROOT.glob("integration_tests/*/")))
    session.run("python", f"integration_tests/{program}", *session.posargs, env={"PYTHONPATH": folders})


ALONE = ("hooks", "schedule", "checkpoint", "trainer")
"""Packages that are installed as their READMEs say by `install_alone`; the others differ in nothing but names."""


@nox.session(name="install", venv_backend="venv", default=False)
@nox.parametrize("package", ALONE)
def install_alone(session: nox.Session, package: str) -> None:
    """Install a package in a fresh environment by the line of its README, with plain pip, and run its first program."""
    member = MEMBERS[f"mimo-{package}"]
    readme = (member.folder / "README.md").read_text(encoding="utf-8")
    command, *_ = re.findall(r"^```sh\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    session.chdir(ROOT)
    session.run(*shlex.split(command.replace("\\\n", "")))
    members = closure({member.name: frozenset()})
    session.run("python", "-m", "pip", "check")
    session.run("python", "-c", guard_of(members, absent=("torch",)))
    session.chdir(session.create_tmp())
    if package == "trainer":
        (settings, *_) = re.findall(r"^```toml\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
        Path("text.toml").write_text(settings, encoding="utf-8")
        Path("train.jsonl").write_text('{"text": "to be or not to be"}\n' * 8, encoding="utf-8")
        session.run("mimo", "check", "text.toml")
        session.run("mimo", "train", "text.toml", "run.steps=2", "run.directory=run", env={"OMP_NUM_THREADS": "1"})
    else:
        program, *_ = re.findall(r"^```python\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
        session.run("python", "-c", program)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train the digit reader; further arguments are its settings: ``nox -s demo -- run.steps=50``."""
    install(session, everything())
    session.run("mimo", "train", "examples/digits.toml", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run one program of benchmarks: ``nox -s bench -- NAME [ARGUMENTS]``."""
    known = sorted(path.stem for path in ROOT.glob("benchmarks/*.py") if re.match(r"[a-z]", path.stem))
    if not session.posargs or session.posargs[0] not in known:
        session.error(f"say which: nox -s bench -- NAME, with NAME one of {', '.join(known)}")
    install(session, everything(), "bench")
    session.run("python", f"benchmarks/{session.posargs[0]}.py", *session.posargs[1:])


@nox.session(default=False)
def oracle(session: nox.Session) -> None:
    """Compare layouts that nobody chose with the one-process run: ``nox -s oracle -- --random 20 --seed 1``."""
    install(session, everything(), "integration")
    run_beside_tests(session, "oracle/drawn.py")


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Check settings that are wrong in ways nobody chose: ``nox -s fuzz -- --count 1000 --seed 1``."""
    install(session, everything(), "integration")
    run_beside_tests(session, "commands/fuzz.py")


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Run what takes long: of all tests, or ``-- integration_tests/oracle/test_oracle_muon.py`` of some."""
    install(session, everything(), "integration")
    named = [one for one in session.posargs if (ROOT / one.partition("::")[0]).exists()]
    where = [ROOT / one.partition("::")[0] for one in named or ("integration_tests", "packages", "plugins")]
    how = side_by_side(path for one in where for path in ([one] if one.is_file() else files_of(one)))
    options = (one for one in session.posargs if one not in named)
    session.run("pytest", *(named or map(str, where)), "-m", "soak", *how, *options)
