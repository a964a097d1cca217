"""``mimo checkpoint``: looking into checkpoints, checking, comparing, rewriting and converting them, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from mimo.trainer.commands.hf import export_hf, import_hf


def make_checkpoint_app() -> App:
    """Return the command with its subcommands."""
    app = App(name="checkpoint", help="Look into a checkpoint, check, compare, rewrite or convert it.")
    for command in (inspect, verify, diff, reshard, merge, import_hf, export_hf):
        app.command(command)
    return app


def inspect(checkpoint: Path, /, *, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Show what a checkpoint holds: modules and their layout, tensors, values, and the settings that saved it.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        as_json: print its manifest instead, without checksums.
    """
    from mimo.checkpoint import read_manifest
    from mimo.trainer.commands.tables.checkpoint import show_manifest
    from mimo.trainer.commands.tables.console import make_console
    from mimo.trainer.resume.resume_point import step_folder

    folder = step_folder(checkpoint)
    manifest = read_manifest(folder)
    if not as_json:
        show_manifest(make_console(), folder, manifest)
        return
    body = json.loads((folder / "manifest.json").read_bytes())["body"]
    body["shards"] = {name: shard["bytes"] for name, shard in body["shards"].items()}
    print(json.dumps(body, indent=1))


def verify(checkpoint: Path, /) -> None:
    """Read every byte of a checkpoint and compare it with its checksums.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
    """
    from mimo.checkpoint import verify as verify_step
    from mimo.trainer.commands.tables.memory import show_bytes
    from mimo.trainer.resume.resume_point import step_folder

    folder = step_folder(checkpoint)
    found = verify_step(folder)
    print(
        f"{folder}: {found.tensors} tensors in {found.shards} shards, {found.blocks} blocks, "
        f"{show_bytes(found.bytes)}: as they were written"
    )


def diff(first: Path, second: Path, /) -> int:
    """Show what differs between two checkpoints, saved in any layouts; ends with 0 if nothing does, 1 if anything.

    Args:
        first: a checkpoint's folder, or a run directory for the newest one.
        second: another one.
    """
    from mimo.checkpoint import diff as diff_steps
    from mimo.trainer.commands.tables.checkpoint import show_differences
    from mimo.trainer.commands.tables.console import make_console
    from mimo.trainer.resume.resume_point import step_folder

    folders = step_folder(first), step_folder(second)
    found = diff_steps(*folders)
    show_differences(make_console(), *folders, found)
    return int(bool(found))


def reshard(
    source: Path,
    target: Path,
    /,
    *,
    parts: int = 1,
    shard_bytes: int = 2 << 30,
    drop: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
) -> None:
    """Rewrite a checkpoint in other pieces; every block of it is verified. It loads as the old one does.

    Args:
        source: its folder, or a run directory for the newest one.
        target: folder for the new one, which gets the same step; that must not be there yet.
        parts: pieces that each tensor is cut into along its first dim.
        shard_bytes: most bytes of data in a file, unless a single piece is larger.
        drop: pattern of names to leave out, such as "optimizer.*"; may be given several times.
    """
    from mimo.checkpoint import reshard as reshard_step
    from mimo.trainer.resume.resume_point import step_folder
    from mimo.trainer.run.begin import written_into

    with written_into(target):
        print(reshard_step(step_folder(source), target, parts=parts, shard_bytes=shard_bytes, drop=drop))


def merge(checkpoint: Path, out: Path, /) -> None:
    """Add what LoRA has learned to the weights, and write these alone as a new checkpoint.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        out: folder for the new one, which gets the same step; that must not be there yet.
    """
    from mimo.trainer.exporting.merge import merge as merge_step
    from mimo.trainer.resume.resume_point import step_folder
    from mimo.trainer.run.begin import written_into

    with written_into(out):
        print(merge_step(step_folder(checkpoint), out))
