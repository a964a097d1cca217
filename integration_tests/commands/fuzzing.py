"""Settings that are wrong in ways nobody chose, each from a generator of its own, and what `mimo check` makes of them.

A check runs in a fork of this process, which has imported what it needs: nothing is launched, CPU time and peak memory
are those of the fork alone as the system counts them, and one that would hang or fill memory is stopped by its limits.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs
import tomli_w
from fuzz_values import HOSTILE, hostile_text
from house import ROOT
from tables import Table

from mimo.data import DATASETS, TOKENIZERS
from mimo.hooks import ConfigError, Kind
from mimo.model import ENCODERS, LANGUAGE_MODELS
from mimo.optimizer import OPTIMIZERS
from mimo.schedule import SCHEDULES
from mimo.trainer import Settings
from mimo.trainer.commands.main import run
from mimo.trainer.runtime import EXAMPLE, ModuleSettings, find_installed, join_path, own_keys, read_table

REFUSED_SECONDS, REFUSED_BYTES = 2.0, 100 << 20
"""What a refusal may take beyond a sound check of the same file."""
ACCEPTED_SECONDS, ACCEPTED_BYTES = 120.0, 4 << 30
"""What a check of settings that are accepted may take: they may be large."""
_OUTPUT_BYTES = 1 << 16
_OBEYED = re.compile("[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""What a terminal obeys or reorders text by, tabs too."""
_KINDS: Mapping[str, Kind[Any]] = {
    "data": DATASETS,
    "tokenizer": TOKENIZERS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}
_MOCK = {"plugin": "mock", "text": 16, "height": 32, "width": 32, "max_tokens": 64}
_SMALL = {"hidden": 24, "layers": 2, "heads": 2, "intermediate": 32}
_PICTURES = {"width": 16, "layers": 2, "heads": 2, "intermediate": 16, "patch": 8}


@attrs.frozen(kw_only=True)
class Case:
    """Settings to check.

    Args:
        base: name of the sound settings that they were made of.
        text: of the file, which may be no TOML.
        overrides: words of the command line.
        changes: what was done, for whoever reads the report.
    """

    base: str
    text: str
    overrides: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Checked:
    """What a check did.

    Args:
        code: exit code; negative for the signal that ended it.
        out: what it printed, its beginning.
        err: what it said on standard error, likewise.
        seconds: CPU time.
        peak: bytes of memory at most, those of the process that it was forked from included.
    """

    code: int
    out: str
    err: str
    seconds: float
    peak: int


def bases() -> Mapping[str, Table]:
    """Return sound settings by name: examples, the file of `mimo init`, and layouts with every plugin of ours."""
    found: dict[str, Table] = {"init": _plain(EXAMPLE)}
    for path in sorted((ROOT / "examples").glob("*.toml")):
        found[path.stem] = _plain(read_table(path))
    hearing = found["digits-see-and-hear"]  # whose clips take a minute to make
    hearing["data"] = {"plugin": "digits", "max_tokens": 64}
    del found["digits-distil"]["load"], found["emoji"]  # which need a run, and data, that nobody has made here
    for encoder, more in (
        ("vit", {}),
        ("siglip", {"mode": "tiles", "size": 32}),
        ("clip", {"size": 32}),
        ("radio", {"patch": 8, "positions": 8, "max_patches": 64}),
    ):
        found[encoder] = _layout({"plugin": encoder, "ranks": "0-1", "config": {**_PICTURES, **more}})
    found["pipeline"] = _layout(
        {"plugin": "vit", "ranks": "4-5", "batch_factor": 2, "recompute": "full", "config": _PICTURES},
        {"ranks": "0-3", "pp": 2, "chunks": 2, "config": {**_SMALL, "layers": 4}},
        schedule={"plugin": "interleaved"},
        run={"global_batch": 16},
    )
    found["experts"] = _layout(
        {"plugin": "vit", "ranks": "0-3", "frozen": True, "prefetch": True, "config": _PICTURES},
        {
            "ranks": "4-7",
            "tp": 2,
            "ep": 2,
            "optimizer": {"clip_group": "deep"},
            "config": {**_SMALL, "experts": 4, "dense_layers": 1, "z_loss": 0.01},
        },
        optimizer={"plugin": "distributed", "shard": "gradients", "clip_groups": {"deep": 0.5}},
    )
    found["adapted"] = _layout(
        {"plugin": "vit", "ranks": "0", "frozen": ["encoder"], "config": _PICTURES},
        {"ranks": "1", "lora": {"rank": 2, "targets": ["*attention*"]}, "config": _SMALL},
        optimizer={"plugin": "muon", "patterns": {"*lora*": {"weight_decay": 0.0}}},
        rerun={"mode": "validate", "skip_steps": [2], "inject": {"step": 1, "module": "language", "rank": 1}},
    )
    found["hybrid"] = _layout(
        {"plugin": "vit", "ranks": "0", "config": _PICTURES},
        {
            "plugin": "hybrid",
            "ranks": "0",
            "config": {"hidden": 24, "pattern": "M-*E", "heads": 2, "experts": 2, "mamba_heads": 2},
        },
        optimizer={"plugin": "cpu-offload", "fraction": 0.5},
        schedule={"plugin": "ahead"},
    )
    drawing = found["drawing"] = _plain(found["digits-read-and-draw"])
    frozen = {"frozen": True, "prefetch": True}
    drawing["modules"]["vision"] |= {"feeds": ["language", "drawer"], **frozen}
    drawing["modules"]["language"] |= frozen
    drawing["modules"]["drawer"] |= {"ranks": "2-3", "cp": 2}
    return found


def _layout(vision: Table, language: Table | None = None, **sections: Table) -> Table:
    words = {"ranks": "2-3", "tp": 2, "config": _SMALL} if language is None else language
    table: Table = {
        "run": {"name": "fuzz", "steps": 4, "global_batch": 8, "micro_batch": 2, "device": "cpu"},
        "data": _MOCK,
        "modules": {"vision": vision, "language": {"plugin": "decoder", **words}},
    }
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys}
    return _plain(table)


def _plain(table: Mapping[str, Any]) -> Table:
    """Return a copy that may be changed."""
    copied: Table = json.loads(json.dumps(table))
    return copied


def draw(rng: random.Random, sound: Mapping[str, Table]) -> Case:
    """Draw sound settings, and one to three things that are done to them."""
    base = rng.choice(sorted(sound))
    table, text, overrides, changes = _plain(sound[base]), None, [], []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        how = rng.choice(("value", "value", "value", "value", "key", "remove", "misspell", "override", "text"))
        if how == "override":
            overrides.append(_draw_override(rng, table))
            changes.append(f"override {overrides[-1]!r:.100}")
        elif how == "text":
            text = rng.choice(_DAMAGES)(rng, text or tomli_w.dumps(table))
            changes.append("damaged text")
        elif text is None:
            changes.append(_CHANGES[how](rng, table))
    return Case(
        base=base,
        text=tomli_w.dumps(table) if text is None else text,
        overrides=tuple(overrides),
        changes=tuple(changes),
    )


def _set_value(rng: random.Random, table: Table) -> str:
    path = rng.choice(list(_paths(table)))
    return _set(table, path, rng.choice(HOSTILE)(rng))


def _set_known_key(rng: random.Random, table: Table) -> str:
    """Set a key that has a default, of a section or of a plugin's config."""
    path = rng.choice(list(_known_keys(table)))
    return _set(table, path, rng.choice(HOSTILE)(rng))


def _remove(rng: random.Random, table: Table) -> str:
    *above, key = rng.choice(list(_paths(table)))
    del _at(table, above)[key]
    return f"without {'.'.join((*above, key))}"


def _misspell(rng: random.Random, table: Table) -> str:
    *above, key = rng.choice(list(_paths(table)))
    inside = _at(table, above)
    wrong = rng.choice((key[:-1], key + key[-1:], key.upper(), f"{key}\x1b[31m", hostile_text(rng), ""))
    inside[wrong] = inside.pop(key)
    return f"{'.'.join((*above, key))} as {wrong!r:.60}"


def _set(table: Table, path: Sequence[str], value: Any) -> str:
    *above, key = path
    inside = table
    for name in above:
        inside = inside.setdefault(name, {})
    inside[key] = value
    return f"{'.'.join(path)} = {_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"
    return f"{str(value)!r:.60}"


def _draw_override(rng: random.Random, table: Table) -> str:
    path = ".".join(rng.choice([*_paths(table), *_known_keys(table)]))
    value = rng.choice(HOSTILE)(rng)
    if rng.random() < 0.3:
        return rng.choice((path, f"={path}", f"{path}=", f"{path}..x=1", f'"{path}=1', f"{path}={hostile_text(rng)}"))
    try:
        return f"{path}={tomli_w.dumps({'v': value}).removeprefix('v = ').strip()}"
    except ValueError:
        return f"{path}={'9' * 5000}"


_CHANGES: Mapping[str, Callable[[random.Random, Table], str]] = {
    "value": _set_value,
    "key": _set_known_key,
    "remove": _remove,
    "misspell": _misspell,
}


def _cut_off(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text))]


def _repeat_line(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "".join(lines)


def _change_letter(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text))
    return text[:at] + rng.choice(("\x00", "\x1b", "\u202e", '"', "[", "{", "=", "\n", "é", "9")) + text[at + 1 :]


def _nest(rng: random.Random, text: str) -> str:
    deep = rng.choice((40, 1000, 3000))
    return f"{text}\n[deep]\nvalue = {rng.choice(('[' * deep + ']' * deep, '{a=' * deep + '1' + '}' * deep))}\n"


def _long_number(rng: random.Random, text: str) -> str:
    return f"{text}\n[numbers]\nvalue = {rng.choice(('', '-', '0x', '1.', '1e'))}{'9' * rng.choice((30, 400, 5000))}\n"


_DAMAGES = (_cut_off, _repeat_line, _change_letter, _nest, _long_number)


def _paths(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, key))


def _known_keys(table: Table) -> Iterator[tuple[str, ...]]:
    """Yield the paths of keys that are known in a file: those of sections, of modules, and of their plugins."""
    for section in attrs.fields(Settings):
        inside = table.get(section.name, {})
        if section.name == "modules":
            for name, module in inside.items() if isinstance(inside, dict) else ():
                yield from (("modules", name, key) for key in own_keys(ModuleSettings))
                kind: Kind[Any] = LANGUAGE_MODELS if name == "language" else ENCODERS
                yield from _plugin_keys(kind, module, ("modules", name, "config"))
            continue
        kinds = section.type if isinstance(section.type, type) else None
        if kinds is not None and attrs.has(kinds):
            yield from ((section.name, key) for key in own_keys(kinds))
        if section.name in _KINDS:
            yield from _plugin_keys(_KINDS[section.name], inside, (section.name,))


def _plugin_keys(kind: Kind[Any], table: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    plugin = table.get("plugin") if isinstance(table, dict) else None
    defaults = {"tokenizer": "byte", "optimizer": "adamw", "schedule": "1f1b"}
    name = plugin if isinstance(plugin, str) else defaults.get(above[0], "")
    try:
        config = find_installed(kind, name, "plugin").config
    except ValueError:
        return
    for field in attrs.fields(config):
        yield (*above, field.name)
        if isinstance(field.default, attrs.Factory) and attrs.has(field.default.factory):  # type: ignore[arg-type]
            yield from ((*above, field.name, key.name) for key in attrs.fields(field.default.factory))


def _at(table: Table, path: Sequence[str]) -> Table:
    for key in path:
        table = table[key]
    return table


def check_forked(case: Case, folder: Path) -> Checked:
    """Check settings in a fork of this process, stopped where it takes far more than settings may."""
    file, out, err = folder / "fuzz.toml", folder / "out", folder / "err"
    file.write_bytes(case.text.encode("utf-8", "surrogatepass"))
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _run_check(["check", str(file), *case.overrides], folder, out, err)
    _, status, used = os.wait4(child, 0)
    return Checked(
        code=os.waitstatus_to_exitcode(status),
        out=_read(out),
        err=_read(err),
        seconds=used.ru_utime + used.ru_stime,
        peak=used.ru_maxrss << 10,
    )


def _run_check(words: Sequence[str], folder: Path, out: Path, err: Path) -> NoReturn:
    code = 99
    try:
        for path, number in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(folder)
        limit = int(ACCEPTED_SECONDS) + 10
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 2 * ACCEPTED_BYTES, held + 2 * ACCEPTED_BYTES))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10 * limit)  # one that only waits uses no CPU time
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        code = run(words)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_OUTPUT_BYTES).decode("utf-8", "replace")


def faults(case: Case, found: Checked, sound: Checked) -> Iterator[str]:
    """Yield what is wrong with what a check made of settings.

    Args:
        case: the settings.
        found: of them.
        sound: of the settings that they were made of.
    """
    seconds, peak = found.seconds - sound.seconds, found.peak - sound.peak
    if found.code == 0:
        if seconds > ACCEPTED_SECONDS or peak > ACCEPTED_BYTES:
            yield f"accepted, and took {seconds:.1f} s and {peak >> 20} MiB more than a sound check"
    elif found.code not in (2, 3) or "Traceback" in found.err:
        yield f"ended with {found.code}: {found.err[-600:]}"
    else:
        if seconds > REFUSED_SECONDS or peak > REFUSED_BYTES:
            yield f"refused after {seconds:.1f} s and {peak >> 20} MiB more than a sound check: {found.err[:300]}"
        if not has_place(case, found.err):
            yield f"refused without a setting's path: {found.err[:300]}"
    if bad := _OBEYED.search(found.out + found.err):
        yield f"prints {bad[0]!r}"


def has_place(case: Case, err: str) -> bool:
    """Return whether a refusal begins with a setting's whole path, the file, or a word of the command line."""
    place, expects, _ = err.removeprefix("mimo: ").partition(": expected ")
    if not err.startswith("mimo: ") or not expects or not place:
        return False
    tops = {_shown(join_path("", key)) for key in (*_top_keys(case.text), *own_keys(Settings))}
    if place.endswith("fuzz.toml") or any(_is_at(place, top) for top in tops):
        return True
    words = [_shown(word) for word in (word.partition("=")[0].strip() for word in case.overrides) if word]
    return any(_is_at(place, word) or _is_at(word, place) for word in words) or any(
        place == _shown(repr(word)) for word in case.overrides
    )


def _top_keys(text: str) -> Iterable[str]:
    """Return the first keys of a file, none of one that is no TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return ()


def _is_at(place: str, key: str) -> bool:
    """Return whether a place is a key or in it, by key or index; where a message cuts it, what is left of it counts."""
    below = (f"{key}.", f"{key}[")
    if place.endswith("…"):
        return key.startswith(place[:-1]) or place.startswith(below)
    return place == key or place.startswith(below)


def _shown(key: str) -> str:
    """Return a key as messages begin with it."""
    return ConfigError(key, expected="", got="").where
