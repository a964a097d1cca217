"""A settings file for a published model that is read whole: its modules, its tokenizer, and what else a run needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mimo.checkpoint import read_published_json
from mimo.hooks import ConfigError
from mimo.trainer.config.settings import LANGUAGE
from mimo.trainer.published.part import HfPart

_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_END = "eos_token"
_MAX_TOKENS = 2048
_LR = 1e-5


def whole_settings(parts: Sequence[HfPart], data: Path | None = None) -> Mapping[str, Any]:
    """Return settings that fine-tune the modules of one folder in one process, as a file has them.

    Args:
        parts: all modules of the folder, or some with the language model.
        data: of the samples; None for a file that the user is to name.

    Raises:
        ConfigError: the folder has no language model among these, or no tokenizer that can be read here.
    """
    folder = parts[0].folder
    if LANGUAGE not in {part.name for part in parts} or any(part.folder != folder for part in parts):
        names = ", ".join(part.name for part in parts)
        raise ConfigError("--settings", expected="one folder with a language model", got=names)
    items: dict[str, dict[str, str]] = {}
    for part in parts:
        if part.reader.family.whole is not None:
            for key, texts in part.reader.family.whole.tokenizer(part.config).items():
                items.setdefault(key, {}).update(texts)
    return {
        "run": {"name": folder.absolute().name, "steps": 100, "global_batch": 8, "micro_batch": 1},
        "data": {"plugin": "jsonl", "path": str(data or "train.jsonl"), "max_tokens": _MAX_TOKENS},
        "tokenizer": {**_tokenizer(folder), **items},
        "modules": {part.name: {**part.table, "ranks": "0"} for part in parts},
        "optimizer": {"plugin": "adamw", "lr": _LR},
    }


def _tokenizer(folder: Path) -> Mapping[str, Any]:
    file = folder / _TOKENIZER
    if not file.is_file():
        raise ConfigError("--settings", expected=f"a {_TOKENIZER} in the folder", got=f"none in {folder}")
    described = read_published_json(folder / _TOKENIZER_CONFIG) if (folder / _TOKENIZER_CONFIG).is_file() else {}
    end = described.get(_END)
    text = end.get("content") if isinstance(end, Mapping) else end
    if not isinstance(text, str) or not text:
        raise ConfigError(
            "--settings", expected=f"an {_END} in {folder / _TOKENIZER_CONFIG}, which ends every text", got=repr(end)
        )
    return {"plugin": "file", "path": str(file), "end": text}
