"""`mimo init`: a commented file with every key, made from the settings classes, so that it cannot differ from them.

Its values are those of a small run that works: the digit reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import attrs
import tomli_w

from mimo.data import DATASETS, TOKENIZERS
from mimo.hooks import OTHER_KEYS, ConfigError, Kind, PluginError
from mimo.model import ENCODERS, LANGUAGE_MODELS
from mimo.optimizer import OPTIMIZERS
from mimo.schedule import SCHEDULES
from mimo.trainer.config.fields import COMMENT, own_keys
from mimo.trainer.config.plugin_kinds import Find, find_installed
from mimo.trainer.config.settings import ModuleSettings, Settings
from mimo.trainer.config.structure import structure, unstructure

EXAMPLE: Mapping[str, Any] = {
    "run": {"name": "digits", "steps": 400, "global_batch": 64, "micro_batch": 16},
    "data": {"plugin": "digits", "max_tokens": 64},
    "tokenizer": {
        "plugin": "word",
        "words": [
            *("the", "digit", "is"),
            *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
        ],
    },
    "modules": {
        "vision": {
            "plugin": "vit",
            "ranks": "0-1",
            "config": {"patch": 2, "channels": 1, "width": 64, "layers": 2, "heads": 4, "intermediate": 128},
        },
        "language": {
            "plugin": "decoder",
            "ranks": "2-3",
            "tp": 2,
            "config": {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 256},
        },
    },
    "optimizer": {"lr": 3e-3, "lr_schedule": "cosine", "lr_warmup_steps": 20, "clip": 1.0},
}

_WIDTH = 44
_EXAMPLES: Mapping[str, Sequence[str]] = {
    "clip_groups": ("# <clip group> = 0.5",),
    "patterns": ('# "*norm*" = { weight_decay = 0.0 }',),
    "rename": ('# vision = "encoder"',),
}
"""Lines that show what may stand in a table that is empty."""
_TEACHER = (
    "# A frozen language model may teach the one named language, which then learns from both it and labels. It reads",
    '# samples of text, and of what encoders read that have feeds = "teacher":',
    "# [modules.teacher]",
    '# plugin = "decoder"',
    '# ranks = "0"',
    "# config = { hidden = 128, layers = 4, heads = 8, intermediate = 512 }",
    "# distil = { top_k = 8, temperature = 1.0 }  # ids of each row that it sends, and by what logits are divided",
)
_GENERATOR = (
    "# A generator may learn to make items from rows of the language model: those that the data wants made, as digits",
    "# does with task = 'both', and all of a modality that no encoder reads:",
    "# [modules.drawer]",
    '# plugin = "flow"',
    '# fed_by = "language"',
    '# ranks = "0"',
    "# loss_weight = 1.0  # of its own loss, in that of the step",
    "# config = { height = 8, width = 8, channels = 1, patch = 2, hidden = 96, layers = 4, heads = 4 }",
)
_MIXTURE = (
    "# Samples of several datasets, each of any plugin, are those of the plugin mixture:",
    "# [data.sources.captions]",
    '# plugin = "jsonl"',
    '# path = "captions.jsonl"',
    "# weight = 2.0  # or epochs = 1.0; of all sources, or of none",
)


def example_text(find: Find = find_installed, *, on_gpus: bool = False) -> str:
    """Return the commented file; the keys of plugins that are not installed are those that the example sets.

    For GPUs it has layers compute in bf16, which takes an optimizer plugin that keeps fp32 weights beside it.
    """
    settings = structure(_for_gpus(find) if on_gpus else EXAMPLE, Settings, "")
    plain: dict[str, Any] = unstructure(settings)
    lines = [
        "# Every setting of mimo, with the values of a small example. Keys with a default may be left out.",
        "# Try it: mimo check FILE, then mimo train FILE.",
    ]
    kinds: Mapping[str, Kind[Any]] = {
        "data": DATASETS,
        "tokenizer": TOKENIZERS,
        "optimizer": OPTIMIZERS,
        "schedule": SCHEDULES,
    }
    for section in attrs.fields(Settings):
        if section.name == "modules":
            for name, table in plain["modules"].items():
                kind: Kind[Any] = LANGUAGE_MODELS if name == "language" else ENCODERS
                lines += ["", *_module(name, table, kind, find)]
            continue
        section_type = type(getattr(settings, section.name))
        lines += ["", f"# {_first_line(section_type)}", f"[{section.name}]"]
        table = plain[section.name]
        lines += _keys(section_type, table)
        if section.name in kinds:
            extra = {key: value for key, value in table.items() if key not in own_keys(section_type)}
            lines += _plugin_keys(kinds[section.name], table["plugin"], extra, find)
        lines += _tables(section.name, section_type, table)
        lines += ["", *_MIXTURE] if section.name == "data" else []
    return "\n".join(lines) + "\n"


def _for_gpus(find: Find) -> Mapping[str, Any]:
    """Return the example in bf16, if a plugin is installed that can."""
    try:
        find(OPTIMIZERS, "distributed", "optimizer.plugin")
    except (ConfigError, PluginError):
        return EXAMPLE
    return {
        **EXAMPLE,
        "run": {**EXAMPLE["run"], "precision": "bf16"},
        "optimizer": {"plugin": "distributed", **EXAMPLE["optimizer"]},
    }


def _module(name: str, table: Mapping[str, Any], kind: Kind[Any], find: Find) -> Iterator[str]:
    yield f"# {_first_line(ModuleSettings)}"
    yield f"[modules.{name}]"
    inner = ("config", "optimizer")
    yield from _keys(ModuleSettings, {key: value for key, value in table.items() if key not in inner})
    yield ""
    yield f"[modules.{name}.config]"
    yield from _plugin_keys(kind, table["plugin"], table["config"], find)
    yield ""
    yield f"# {_comment_of(ModuleSettings, 'optimizer')}"
    yield f"[modules.{name}.optimizer]"
    yield ""
    yield f"# {_comment_of(ModuleSettings, 'lora')}"
    yield f"# [modules.{name}.lora]"
    yield from ("# rank = 8", "# alpha = 16.0  # 0: rank", '# targets = ["*.attention.*"]')
    yield "# dropout = 0.05  # of features that what is added reads"
    if kind is LANGUAGE_MODELS:
        yield ""
        yield from _TEACHER
        yield ""
        yield from _GENERATOR


def _keys(cls: type, table: Mapping[str, Any]) -> Iterator[str]:
    for field in attrs.fields(cls):
        if not field.metadata.get(OTHER_KEYS) and field.name in table and not isinstance(table[field.name], Mapping):
            yield f"{one_line(field.name, table[field.name]):<{_WIDTH}}  # {field.metadata[COMMENT]}"


def _tables(section: str, cls: type, table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables inside a section, which TOML wants after its keys, each with an example that is a comment."""
    kinds = get_type_hints(cls)
    for name in own_keys(cls):
        if isinstance(table[name], Mapping):
            keys = _keys(kinds[name], table[name]) if attrs.has(kinds[name]) else _EXAMPLES[name]
            yield from ("", f"# {_comment_of(cls, name)}", f"[{section}.{name}]", *keys)


def _plugin_keys(kind: Kind[Any], plugin: str, given: Mapping[str, Any], find: Find) -> Iterator[str]:
    """Yield the plugin's keys, defaults where the example gives nothing; a key without a value in TOML is a comment."""
    try:
        config = find(kind, plugin, f"{kind.noun}.plugin").config
        values = unstructure(structure(given, config, ""))
    except (ConfigError, PluginError):
        config, values = None, given
    for key, value in values.items():
        yield one_line(key, value)
    if config is not None:
        for field in attrs.fields(config):
            if field.name not in values:
                yield f"# {field.name} ="


def one_line(key: str, value: Any) -> str:
    """Return a key and its value as TOML, lists and tables on the same line."""
    if isinstance(value, list):  # on one line, unlike the library's
        return f"{key} = [{', '.join(one_line('', item).removeprefix(' = ') for item in value)}]"
    if isinstance(value, Mapping):  # likewise: a table of its own would take the keys that follow
        return f"{key} = {{ {', '.join(one_line(inner, item) for inner, item in value.items())} }}"
    if not key:
        return " = " + tomli_w.dumps({"key": value}).removeprefix("key = ").rstrip()
    return tomli_w.dumps({key: value}).rstrip()


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").splitlines()[0]


def _comment_of(cls: type, name: str) -> str:
    return str(next(field.metadata[COMMENT] for field in attrs.fields(cls) if field.name == name))
