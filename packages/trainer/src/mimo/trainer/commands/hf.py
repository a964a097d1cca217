"""``mimo checkpoint import-hf`` and ``export-hf``: weights from published folders, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from mimo.hooks import ConfigError, plain_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mimo.trainer.job.job import Job
    from mimo.trainer.published.part import HfPart

_SHARD_BYTES = 5_000_000_000


def import_hf(
    *folders: str,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    config: Annotated[Path | None, Parameter(show_default=False)] = None,
    settings: Annotated[Path | None, Parameter(show_default=False)] = None,
    part: Annotated[tuple[str, ...], Parameter(show_default=False, negative="")] = (),
    ignore: Annotated[tuple[str, ...], Parameter(show_default=False, negative="")] = (),
    plugin: Annotated[tuple[str, ...], Parameter(show_default=False, negative="")] = (),
) -> None:
    """Read Hugging Face folders of safetensors: print the settings that they mean, and write a checkpoint.

    Args:
        folders: vision=DIR to read one module from a folder, or DIR for all of it, which installed plugins must know.
        out: folder for the checkpoint; mimo train FILE --finetune then begins with its weights. Without it and
            --settings, settings are printed and nothing is written.
        config: settings of a run, which must mean the same models as the folders.
        settings: file to write, with all that training the model takes, its tokenizer and images included; with --out
            its load.finetune is the checkpoint, so that runs begin with these weights.
        part: a module of a folder that holds several, vision or language, to be read without the others; may be
            repeated.
        ignore: a key of config.json that drops at random, such as attention_dropout, to be set aside; may be repeated.
        plugin: what is to read an encoder, a generator or the language model; left out, a plugin that names the family
            comes before one that reads any; may be repeated.
    """
    if not folders:
        raise ConfigError("folders", expected="at least one, as DIR or module=DIR", got="none")
    job = None if config is None else _job(config)
    if plugin and job is not None:
        raise ConfigError("--plugin", expected="nothing, as --config names the plugin", got=repr(plugin[0]))
    if settings is not None and (job is not None or settings.exists()):
        expected = "nothing, as --config has the settings" if job is not None else "a new file"
        raise ConfigError("--settings", expected=expected, got=repr(str(settings)))
    parts = _parts(folders, job, ignore, plugin, part)

    import tomli_w

    from mimo.trainer.config.toml import make_settings, write_atomically
    from mimo.trainer.importing.import_hf import prepare, write
    from mimo.trainer.importing.import_report import check_nothing_left, show, show_left
    from mimo.trainer.importing.whole_check import check_whole
    from mimo.trainer.importing.whole_settings import whole_settings
    from mimo.trainer.published.readers import split_word
    from mimo.trainer.resolving.resolve import resolve

    # Before anything is printed: settings of what can't be read help nobody.
    if job is None:
        reads = prepare(parts, {})
    else:
        widths = {module.name: job.row_width(module) for module in job.modules}
        reads = prepare(parts, {module.name: module.config for module in job.modules}, widths)
    check_whole(parts)
    if job is None and not plugin and not part:
        unnamed = {folder for name, folder in map(split_word, folders) if not name}
        check_nothing_left(read for read in reads if read.part.folder in unnamed)
    table = None if settings is None else whole_settings(parts)
    written = None if table is None else resolve(make_settings(table), purpose="generate")
    if settings is not None and table is not None:
        begins = {} if out is None else {"load": {"finetune": str(out)}}
        write_atomically(settings, tomli_w.dumps({**table, **begins}))
        print(_line(f"# settings: {settings}"))
    elif job is None:
        print(tomli_w.dumps({"modules": {part.name: part.table for part in parts}}), end="")
    for line in [*map(show, reads), *show_left(reads)]:
        print(_line(f"# {line}" if job is None else line))
    if out is not None:
        from mimo.trainer.run.begin import written_into

        saved = {part.name: part.table for part in parts}
        whole: Any = {"modules": saved} if job is None else _only(job, saved)
        with written_into(out):
            folder = write(reads, out, config=whole if written is None else written.plain)
        print(f"# {folder}" if job is None else folder)


def export_hf(
    checkpoint: Path,
    out: Path,
    /,
    *,
    module: Annotated[str, Parameter(show_default=False)] = "",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shard_bytes: Annotated[int | None, Parameter(show_default=False)] = None,
    beside: Annotated[Path | None, Parameter(show_default=False)] = None,
    model_type: Annotated[str, Parameter(show_default=False)] = "",
    adapter: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write a model of a checkpoint, LoRA added to its weights, as a folder that `transformers` loads.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        out: the new folder.
        module: which module; the encoder of a published model that was read whole stands for all of it. Left out, the
            whole model where there is such an encoder, or else the language model.
        dtype: of the weights; checkpoints hold them in float32.
        shard_bytes: most bytes of weights in a file, unless a single tensor is larger; left out, 5,000,000,000.
        beside: folder to copy tokenizer files and the like from; left out, the one that the module was imported from.
        model_type: of the family to write; left out, the one that it was imported from, or the first that fits.
        adapter: write what LoRA has learned instead, as a folder that `peft` loads.
    """
    import torch

    from mimo.trainer.config.settings import LANGUAGE
    from mimo.trainer.exporting.export_hf import export, whole_or_language
    from mimo.trainer.resume.resume_point import step_folder

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if shard_bytes is not None and shard_bytes < 1:
        raise ConfigError("--shard-bytes", expected="at least 1", got=repr(shard_bytes))
    if beside is not None and not beside.is_dir():
        raise ConfigError("--beside", expected="a folder", got=repr(str(beside)))
    step = step_folder(checkpoint)
    if not module:
        module = LANGUAGE if adapter else whole_or_language(step)
    if adapter and beside is not None:
        raise ConfigError("--beside", expected="nothing, as --adapter copies no files", got=repr(str(beside)))
    if adapter and shard_bytes is not None:
        raise ConfigError("--shard-bytes", expected="nothing, as --adapter writes one file", got=repr(shard_bytes))
    done = export(
        step,
        out,
        module=module,
        dtype=dtypes[dtype],
        shard_bytes=_SHARD_BYTES if shard_bytes is None else shard_bytes,
        beside=beside,
        model_type=model_type,
        adapter=adapter,
    )
    if adapter:
        print(
            _line(f"{done.folder}: LoRA of {module} for {done.family.architecture}, {done.tensors} tensors of {dtype}")
        )
        return
    print(_line(f"{done.folder}: {module} as {done.family.architecture}, {done.tensors} tensors of {dtype}"))
    if done.family.export_note:
        print(f"note: {done.family.export_note}")
    if done.left:
        print(_line(f"left out, as {done.family.model_type} has no place for it: {', '.join(done.left)}"))
    print(f"copied: {', '.join(done.copied)}" if done.copied else "no tokenizer files: --beside DIR copies them")


def _line(text: str) -> str:
    """Return a text that may hold names of others, on one line and with nothing in it that a terminal obeys."""
    return plain_text(text).replace("\n", "\\n")


def _job(config: Path) -> Job:
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.resolving.resolve import resolve

    return resolve(read_settings(config), purpose="import")


def _parts(
    folders: tuple[str, ...], job: Job | None, ignore: tuple[str, ...], plugin: tuple[str, ...], part: tuple[str, ...]
) -> tuple[HfPart, ...]:
    """Return the modules that the words of the command name.

    Raises:
        ConfigError: a module is named twice, or the settings have none of this name, or its plugin has no table; a
            folder for which no module is named holds a model that can't be read; or nothing is there to be set aside.
    """
    from mimo.checkpoint import read_published_json
    from mimo.trainer.published.find import find_parts
    from mimo.trainer.published.part import CONFIG_NAME
    from mimo.trainer.published.readers import check_plugins, installed_modules, readers_of, split_word

    def ignored(module: str) -> tuple[str, ...]:
        return ignore if job is None else (*ignore, *job.settings.modules[module].ignore)

    found: dict[str, HfPart] = {}
    check_plugins(plugin, [split_word(word)[0] for word in folders])
    for word in folders:
        name, folder = _named(word, job)
        if job is None:
            modules = installed_modules(name, plugin)
        else:
            modules = [(module.name, module.spec) for module in job.modules if name in {"", module.name}]
        described = read_published_json(folder / CONFIG_NAME)
        parts = find_parts(
            folder,
            described,
            readers_of(modules),
            open_to=modules,
            in_sections=bool(name),
            plugins=plugin,
            wanted=part,
            ignore=ignored,
        )
        if part:
            parts = _chosen(parts, part)
        elif not name:
            _check_whole(folder, parts)
        for one in parts:
            if one.name in found:
                raise ConfigError(
                    repr(word),
                    expected="each module once",
                    got=f"{one.name} from {found[one.name].folder} too",
                    fix="Write module=DIR for each.",
                )
            found[one.name] = one
    _check_ignored(ignore, found.values())
    return tuple(found.values())


def _named(word: str, job: Job | None) -> tuple[str, Path]:
    """Return the module that a word of the command names, and its folder; see `_parts`."""
    from mimo.trainer.published.readers import check_table, split_word

    name, folder = split_word(word)
    if not folder.is_dir():
        raise ConfigError(
            repr(word), expected="a folder, or module=folder", got="a file" if folder.exists() else "nothing there"
        )
    if name and job is not None:
        if name not in job.settings.modules:
            raise ConfigError(repr(word), expected=f"a module of {', '.join(job.settings.modules)}", got=repr(name))
        check_table(name, job.module(name).spec)
    return name, folder


def _chosen(parts: tuple[HfPart, ...], wanted: tuple[str, ...]) -> tuple[HfPart, ...]:
    """Return those of a folder's modules that are asked for."""
    known = {part.name for part in parts}
    for name in wanted:
        if name not in known:
            raise ConfigError("--part", expected=f"one of {', '.join(sorted(known))}", got=repr(name))
    return tuple(part for part in parts if part.name in wanted)


def _check_whole(folder: Path, parts: tuple[HfPart, ...]) -> None:
    """Refuse a folder that is to be read whole and holds a model that is not read."""
    from mimo.trainer.published.find import unread_sections
    from mimo.trainer.published.part import CONFIG_NAME

    if left := unread_sections(parts[0].described, parts):
        kinds = " and ".join(f"{section} ({kind})" if kind else section for section, kind in left.items())
        alone = " and ".join(f"{part.name}={folder} reads its {part.reader.family.model_type}" for part in parts)
        raise ConfigError(
            str(folder / CONFIG_NAME),
            expected="models that are all read here, as no module is named",
            got=f"{kinds} too, which would be left behind",
            fix=f"Name the module for which a part of it is wanted: {alone}.",
        )


def _check_ignored(ignore: tuple[str, ...], parts: Iterable[HfPart]) -> None:
    parts = tuple(parts)
    for key in ignore:
        if not any(key in part.ignored for part in parts):
            known = sorted({name for part in parts for name in part.reader.family.dropout})
            raise ConfigError(
                "--ignore",
                expected=f"a key of {', '.join(known) or 'none'}, other than 0 in a config.json of these folders",
                got=repr(key),
            )


def _only(job: Job, saved: Any) -> Any:
    """Return a run's settings, of the modules those that are imported."""
    modules = {name: table for name, table in job.plain["modules"].items() if name in saved}
    return {**job.plain, "modules": modules}
