"""The jsonl dataset, a user's own data: lines of ``{"images": ["a.png", …], "text": "… <image> …"}``, or conversations.

A conversation is ``{"messages": [{"role": "user", "content": …}, …]}``; see `mimo.data.text.chat`.

Beside ``images`` there may be ``audio``, and ``items`` with the files of other modalities: ``{"sonar": ["a.bin", …]}``.
These are read by whoever encodes them. ``roles`` says which items the model is to make: ``{"image": ["output"]}``.
``weight`` is how much each token of the sample counts in the loss, 1 without it. Only the lines' offsets are held, or
read from a file of them that `mimo data index` wrote; a line is parsed, an image opened and its pixels decoded when
they are asked for.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from mimo.data.index import IndexFileError
from mimo.data.samples import DatasetSpec, SplitName, Tokenizer
from mimo.data.sources.lines import open_lines, write_lines
from mimo.data.sources.record_dataset import RecordDataset
from mimo.data.text import ChatSettings
from mimo.hooks import ConfigError, hookimpl

_BEGIN_BYTES = 512


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
        if _is_of_another_kind(path):
            raise ConfigError(
                setting,
                expected="a jsonl file",
                got=f"{str(path)!r}, which holds no text",
                fix="Check the path, and the plugin that is to read it.",
            )
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


def _is_of_another_kind(path: Path) -> bool:
    """Tell whether a file is a table, an archive or a picture: these begin with zeros, which JSON has none of."""
    with path.open("rb") as file:
        begin = file.read(_BEGIN_BYTES)
    return b"\0" in begin and not begin.lstrip().startswith(b"{")


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
