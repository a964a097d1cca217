"""Where chat templates come from: the folder of a tokenizer, or the few that this package names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from mimo.hooks import ConfigError, JsonSource

_FOLDER = Path(__file__).with_name("templates")
_MAX_BYTES = 4 << 20
_CONFIG = "tokenizer_config.json"
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@attrs.frozen(kw_only=True)
class ChatTemplate:
    """A template that turns messages into text.

    Args:
        name: for messages: a name of ours, or the file that it was read from.
        source: in Jinja's language.
        variables: what it is given beside the messages: the texts of special tokens.
    """

    name: str
    source: str
    variables: Mapping[str, str] = attrs.field(factory=dict)


def named_templates() -> dict[str, Path]:
    """Return the files of the templates that have a name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.jinja"))}


def named_template(name: str) -> ChatTemplate:
    """Return a template by its name; `KeyError` if there is none."""
    return ChatTemplate(name=name, source=named_templates()[name].read_text(encoding="utf-8"))


def template_of_folder(folder: Path) -> ChatTemplate | None:
    """Return the template that lies beside a ``tokenizer.json`` as transformers saves it; None if there is none.

    Raises:
        ConfigError: a file that should hold it can't be read.
    """
    config = _read_json(folder / _CONFIG)
    variables = {
        key: text for source in (_read_json(folder / "special_tokens_map.json"), config) for key, text in _texts(source)
    }
    alone = folder / "chat_template.jinja"
    if alone.exists():
        return ChatTemplate(name=str(alone), source=_read(alone), variables=variables)
    for path, found in ((folder / "chat_template.json", None), (folder / _CONFIG, config)):
        source = _source(path, (_read_json(path) if found is None else found).get("chat_template"))
        if source is not None:
            return ChatTemplate(name=str(path), source=source, variables=variables)
    return None


def _source(path: Path, value: Any) -> str | None:
    if isinstance(value, list):  # several, each with a name
        entries = [entry for entry in value if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        named = {entry["name"]: entry.get("template") for entry in entries}
        value = named.get("default")
    if value is None or isinstance(value, str):
        return value
    raise _unusable(path, expected="a template in 'chat_template'", got=type(value).__name__)


def _texts(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for key in _TOKENS:
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found.append((key, text))
    return found


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    source = JsonSource(where="tokenizer.path", error=ConfigError, fix=f"Look at {path}.")
    value = source.parse(_read(path)).value
    if not isinstance(value, dict):
        raise _unusable(path, expected="a JSON object", got=type(value).__name__)
    return value


def _read(path: Path) -> str:
    try:
        if not path.is_file():
            raise _unusable(path, expected="a file", got="something else")
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise _unusable(path, expected=f"at most {_MAX_BYTES:,} bytes", got=f"{size:,}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, expected="a readable UTF-8 file", got=str(error)) from error


def _unusable(path: Path, *, expected: str, got: str) -> ConfigError:
    return ConfigError("tokenizer.path", expected=f"{expected} at {path}", got=got, fix="Save the tokenizer anew.")
