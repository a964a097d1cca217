"""The jsonl dataset, a user's own data: lines of ``{"images": ["a.png", …], "text": "… <image> …"}``, or conversations.

A conversation is ``{"messages": [{"role": "user", "content": …}, …]}``; see `mimo.data.text.chat`.

Beside ``images`` there may be ``audio``, and ``items`` with the files of other modalities: ``{"sonar": ["a.bin", …]}``.
These are read by whoever encodes them. ``roles`` says which items the model is to make: ``{"image": ["output"]}``.
``weight`` is how much each token of the sample counts in the loss, 1 without it. Only the lines' offsets are held, or
read from a file of them that `mimo data index` wrote; a line is parsed, an image opened and its pixels decoded when
they are asked for.
"""

from __future__ import annotations

import codecs
from pathlib import Path

import attrs

from mimo.data.index import IndexFileError
from mimo.data.samples import DatasetSpec, SplitName, Tokenizer
from mimo.data.sources.lines import open_lines, write_lines
from mimo.data.sources.record_dataset import RecordDataset
from mimo.data.text import ChatSettings
from mimo.hooks import ConfigError, hookimpl

_BEGIN_BYTES = 1 << 16
"""Of a file, in which a line must look like a sample."""
_SHOWN_BYTES = 40


@attrs.frozen(kw_only=True)
class JsonlConfig:
    """Settings of ``data.plugin = "jsonl"``.

    Args:
        path: the training samples; blank lines are skipped.
        evaluation_path: the samples of evaluations; without it there are none.
        index: a folder for what `mimo data index` finds; empty: beside the data.
        chat: how conversations become tokens.
    """

    path: str
    evaluation_path: str | None = None
    index: str = ""
    chat: ChatSettings = attrs.field(factory=ChatSettings)


def open_jsonl(config: JsonlConfig, tokenizer: Tokenizer, split: SplitName) -> RecordDataset | None:
    """Return one split; see `DatasetSpec`."""
    found = _path(config, split)
    if found is None:
        return None
    setting, path = found
    try:
        _check_kind(setting, path)
        lines = open_lines(path, config.index)
    except IndexFileError as error:
        raise ConfigError(
            setting,
            expected="beside it, offsets of its own lines",
            got=f"for {str(path)!r} others: {error}",
            fix="Run `mimo data index` with these settings again.",
        ) from error
    except OSError as error:
        raise ConfigError(setting, expected="a readable jsonl file", got=f"{str(path)!r} ({error})") from error
    if not len(lines):
        got = f"{str(path)!r}, which is empty"
        raise ConfigError(setting, expected="a jsonl file with at least one sample", got=got)
    return RecordDataset(lines, tokenizer, config.chat)


def index_jsonl(config: JsonlConfig, split: SplitName) -> Path | None:
    """Write the offsets of the lines of one split; see `DatasetSpec`."""
    found = _path(config, split)
    try:
        return None if found is None else write_lines(found[1], config.index)
    except OSError as error:
        raise ConfigError(
            "data.index",
            expected="a folder in which the offsets of lines can be written",
            got=str(error),
            fix="Set data.index to a folder of yours; without it, that is where the data are.",
        ) from error


def _check_kind(setting: str, path: Path) -> None:
    """Refuse a file of another kind by its beginning; broken lines beside others pass.

    Raises:
        ConfigError: no line of it may be an object.
    """
    with path.open("rb") as file:
        begin = file.read(_BEGIN_BYTES)
    fix = "Check the path, and the plugin that is to read it."
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        got, fix = "which is in UTF-16", "Save it as UTF-8."
    elif b"\0" in begin and not begin.lstrip().startswith(b"{"):  # a table, an archive, a picture
        got = "which holds no text"
    else:
        lines = [line.strip() for line in begin.removeprefix(codecs.BOM_UTF8).split(b"\n")]
        if len(begin) == _BEGIN_BYTES and lines[-1]:
            lines[-1] += b"}"  # it is cut, maybe after a comma
        first = next((number for number, line in enumerate(lines, start=1) if line), 0)
        if not first or (lines[first - 1] != b"[" and any(map(_may_be_object, lines))):
            return
        got = f"whose line {first} begins with {lines[first - 1][:_SHOWN_BYTES].decode(errors='replace')!r}"
        command = {b"[": "jq -c '.[]' FILE", b"{": "jq -c . FILE"}.get(lines[first - 1][:1])
        how = f"as `{command}` does" if command else 'such as {"text": "…"}'
        fix = f"Write each sample on a line, {how}. {fix}"
    expected = "a jsonl file, a JSON object on each line"
    raise ConfigError(setting, expected=expected, got=f"{str(path)!r}, {got}", fix=fix)


def _may_be_object(line: bytes) -> bool:
    """Tell whether a line is an object, whole or broken, and no part of JSON that is written over some lines."""
    return line.startswith(b"{") and line != b"{" and not line.endswith(b",")


def _path(config: JsonlConfig, split: SplitName) -> tuple[str, Path] | None:
    """Return setting and path of one split, None where there is none."""
    if split == "train":
        setting, path = "data.path", config.path
    elif config.evaluation_path is None:
        return None
    else:
        setting, path = "data.evaluation_path", config.evaluation_path
    # Not `open` alone: a folder has its own error, and a named pipe would wait forever.
    if not Path(path).is_file():
        raise ConfigError(
            setting,
            expected="an existing jsonl file",
            got=repr(path),
            fix="Check the path; it is relative to the folder in which the command runs.",
        )
    return setting, Path(path)


@hookimpl
def mimo_register_datasets() -> list[DatasetSpec]:
    """Return ``jsonl``."""
    return [DatasetSpec(name="jsonl", config=JsonlConfig, open=open_jsonl, index=index_jsonl, encodes_samples=True)]
