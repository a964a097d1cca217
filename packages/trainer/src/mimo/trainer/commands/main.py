"""The ``mimo`` command. Commands import what they need when they run, so that ``mimo --help`` answers at once."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from mimo.hooks import ConfigError, UserError, plain_text
from mimo.trainer.commands.checkpoint import make_checkpoint_app
from mimo.trainer.config.plain_values import check_words

_REFUSED = 2
_FAILED = 3
_INTERRUPTED = 130
_UNREAD = 141
_TOLD_SECONDS = 15.0


def main() -> None:
    """Run the command line of this process and exit."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # else Python tells of it when it ends, as it tries once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _UNREAD
    sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code; errors are told on standard error, once and plainly."""
    try:
        check_words(words)
        code = make_app()(words, exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:  # it has printed what is wrong
        if dashed := [word for word in words if re.match(r"--?\w+(\.\w+)+(=|$)", word)]:
            _tell(f"mimo: settings are written as key=value, without dashes: {dashed[0].lstrip('-')}")
        return _REFUSED
    except UserError as error:
        _tell(f"mimo: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 -- a bug of ours or of a plugin: shown in full, with our exit code
        if isinstance(error, BrokenPipeError) and _is_unread():
            return _UNREAD
        _tell(traceback.format_exc().rstrip())
        return _FAILED
    return int(code or 0)


def _is_unread() -> bool:
    """Tell whether nobody reads standard output on, as after ``| head``."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))


def make_app() -> App:
    """Return the command with its subcommands."""
    app = App(
        name="mimo",
        help="Train multimodal models in which every module has a parallel grid of its own.",
        version=lambda: version("mimo-trainer"),
        help_flags=["--help", "-h"],
        help_format="plaintext",  # others would take <image> for a tag
        suppress_keyboard_interrupt=False,
    )
    for command in (train, check, simulate, profile, evaluate, generate, plugins, init):
        app.command(command)
    app.command(make_checkpoint_app())
    return app


def train(
    file: Path, /, *overrides: str, finetune: Annotated[Path | None, Parameter(show_default=False)] = None
) -> int:
    """Train as FILE says, on local processes, or as one rank where torchrun or Slurm started this process.

    Args:
        file: settings in TOML; `mimo init` writes one.
        overrides: settings that differ, as key=value: run.steps=50 modules.vision.ranks=0-3.
        finetune: a checkpoint or a run whose weights alone this new run begins with, as load.finetune.
    """
    from mimo.launch import with_slurm
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.run.begin import enter_directory, resolve_run

    given = () if finetune is None else (f"load.finetune={json.dumps(str(finetune))}",)
    settings, environ = read_settings(file, (*overrides, *given)), with_slurm(os.environ)
    job = resolve_run(settings, environ)

    from mimo.trainer.cost.parameter_names import check_patterns_of
    from mimo.trainer.run import train as _train
    from mimo.trainer.run.tasks import run_job

    check_patterns_of(job, computes=False)
    enter = partial(enter_directory, settings, environ)
    return run_job(job, _train.train, purpose="train", enter=enter, stops=True)


def check(file: Path, /, *overrides: str, elsewhere: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Show what FILE would run: grids, memory, the plan, and what the first step sends. Nothing is launched.

    What `mimo train` would refuse is refused here too.

    Args:
        file: settings in TOML.
        overrides: settings that differ, as key=value.
        elsewhere: leave out what only the machine that trains can answer: its folders, GPUs and plugins.
    """
    from mimo.launch import check_unlocked, with_slurm
    from mimo.trainer.commands.show import make_console, show_job
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.resume.directory import check_writable
    from mimo.trainer.run.begin import LEFT_TO_THE_MACHINE, resolve_run

    settings = read_settings(file, overrides)
    environ = with_slurm(os.environ)
    job = resolve_run(settings, environ, elsewhere=elsewhere)
    if not elsewhere:  # what training finds out by taking its directory
        check_unlocked(job.directory)
        check_writable(job.directory)

    from mimo.launch import ranks_of_machine
    from mimo.trainer.cost.memory import estimate_memory
    from mimo.trainer.cost.module_stats import module_stats
    from mimo.trainer.cost.parameter_names import check_patterns_of, followers
    from mimo.trainer.cost.sample_stats import SampleStats
    from mimo.trainer.step.traffic import expect_traffic

    check_patterns_of(job)
    show_job(
        make_console(),
        job,
        estimate_memory(job),
        () if job.train is None else expect_traffic(job, 1),
        followers=dict(followers(job)),
        stats=list(module_stats(job, SampleStats.of(job))),
        machine=ranks_of_machine(environ, job.world),
    )
    if elsewhere:
        data = (
            ""
            if job.train is not None
            else "; the data, which are not here, so that samples of text alone stand for them"
        )
        print(f"\nnot looked at, as only the machine that trains can answer it: {LEFT_TO_THE_MACHINE}{data}")


def simulate(
    file: Path,
    /,
    *overrides: str,
    profile: Annotated[Path | None, Parameter(show_default=False)] = None,
    out: Path = Path(),
) -> None:
    """Play one step of FILE through, and write its timeline: trace.json and timeline.html. Nothing is launched.

    Args:
        file: settings in TOML.
        overrides: settings that differ, as key=value.
        profile: costs that `mimo profile` measured, as schedule.profile; without any they follow from a formula.
        out: folder to write into.
    """
    from mimo.trainer.commands.show import make_console
    from mimo.trainer.commands.simulate import show_simulated, simulate_job
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_logging

    given = () if profile is None else (f"schedule.profile={json.dumps(str(profile))}",)
    settings = read_settings(file, (*overrides, *given))
    check_logging(settings)
    show_simulated(make_console(), simulate_job(resolve(settings), out))


def profile(file: Path, /, *overrides: str, out: Path = Path("costs.json")) -> int:
    """Measure what the computations and messages of FILE take on this machine, for schedule.profile.

    Args:
        file: settings in TOML.
        overrides: settings that differ, as key=value.
        out: file to write.
    """
    from mimo.launch import with_slurm
    from mimo.trainer.config.toml import read_settings
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_world

    settings = read_settings(file, (*overrides, 'schedule.profile=""'))
    _check_output(out, file)
    job = resolve(settings)
    check_world(job.world, with_slurm(os.environ))

    from mimo.trainer.run import profiling as _profiling
    from mimo.trainer.run.tasks import run_job

    code = run_job(job, partial(_profiling.profile_job, out), purpose="train")
    if not code:
        print(f"{out}: costs of {len(job.graph.stages)} stages; set schedule.profile to it")
    return code


def _check_output(out: Path, file: Path) -> None:
    """Refuse a file that could not be written, or would replace the settings, before anything is measured.

    Raises:
        ConfigError: why not.
    """
    folder = out.absolute().parent
    if not folder.is_dir():
        raise ConfigError("--out", expected="a file in a folder that exists", got=repr(str(out)), fix="Make it first.")
    if out.is_dir() or not os.access(out if out.exists() else folder, os.W_OK):
        raise ConfigError("--out", expected="a file that can be written", got=repr(str(out)))
    if out.exists() and out.samefile(file):
        raise ConfigError("--out", expected="another file than the settings", got=repr(str(out)))


def evaluate(checkpoint: Path, /, *overrides: str) -> int:
    """Evaluate a checkpoint on the held-out samples, in one process unless ranks are overridden.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        overrides: settings that differ from those that it was saved with, as key=value.
    """
    from mimo.launch import with_slurm
    from mimo.trainer.resolving.checkpoint_settings import settings_of
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_world
    from mimo.trainer.resume.resume_point import step_folder
    from mimo.trainer.run.tasks import evaluate_checkpoint, run_job

    folder = step_folder(checkpoint)
    job = resolve(settings_of(folder, overrides, "evaluate"), purpose="evaluate")
    check_world(job.world, with_slurm(os.environ))
    return run_job(job, partial(evaluate_checkpoint, folder), purpose="evaluate")


def generate(
    checkpoint: Path,
    /,
    *,
    image: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    audio: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    item: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    text: Annotated[str, Parameter(show_default=False)] = "",
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: Annotated[int | None, Parameter(show_default=False)] = None,
    tp: int = 1,
) -> int:
    """Print what a checkpoint writes after images, sounds and text, piece by piece as it is written.

    Args:
        checkpoint: its folder, or a run directory for the newest one.
        image: images of the prompt, in the order of their placeholders.
        audio: clips of the prompt, likewise.
        item: items of other modalities, likewise, as MODALITY=FILE.
        text: the prompt, with a placeholder such as <image> for each image; left out, the items alone.
        max_tokens: most tokens to write.
        temperature: divides the logits before a token is drawn; 0 for the likeliest one.
        top_p: draws among the likeliest tokens that together have this probability; 1 for all.
        top_k: draws among so many of the likeliest tokens; 0 for all.
        seed: of the draws; left out, that of the run.
        tp: processes over which the language model is split.
    """
    from mimo.launch import with_slurm
    from mimo.trainer.decoding.prompt import lay_out_prompt, prompt_of
    from mimo.trainer.decoding.sampling import Sampling, nothing_drawn
    from mimo.trainer.resolving.checkpoint_settings import settings_of
    from mimo.trainer.resolving.resolve import resolve
    from mimo.trainer.resume.directory import check_world
    from mimo.trainer.resume.resume_point import step_folder
    from mimo.trainer.run.tasks import Request, generate_text, read_items, run_job

    for name, value in (("max-tokens", max_tokens), ("tp", tp)):
        if value < 1:
            raise ConfigError(f"--{name}", expected="a whole number from 1", got=repr(value))
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed or 0)
    if seed is not None and not temperature:
        raise nothing_drawn("--seed")
    items = read_items(image, audio, item)
    if not items and not text:
        raise ConfigError("--text", expected="something to go on from", got="nothing", fix="Give --text, or an item.")
    folder = step_folder(checkpoint)
    job = resolve(settings_of(folder, (), "generate", tp=tp), purpose="generate")
    lay_out_prompt(job, prompt_of(job, text, items))
    check_world(job.world, with_slurm(os.environ))
    if seed is None:
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=job.settings.run.seed)
    request = Request(items=items, text=text, max_tokens=max_tokens, sampling=sampling)
    return run_job(job, partial(generate_text, folder, request), purpose="generate")


def plugins(*settings: str, check: str | None = None) -> int:
    """List what is installed: name, distribution, version and hooks of each plugin.

    Args:
        settings: with --check, settings of the encoder's config: key=value.
        check: an encoder to look at instead: whether it keeps the promises that training on any layout rests on.
            Ends with 0 if it does, 1 if it breaks one.
    """
    from mimo.hooks import survey
    from mimo.trainer.commands.show import make_console, show_plugins
    from mimo.trainer.config.plugin_kinds import KINDS

    if check is not None:
        from mimo.trainer.commands.check_plugin import check_plugin

        broken = 0
        for verdict in check_plugin(check, settings):
            print(verdict, flush=True)
            broken += verdict.broken is not None
        return int(broken > 0)
    if settings:
        raise ConfigError("plugins", expected="no settings without --check", got=repr(settings[0]))
    make_console().print(show_plugins(survey(KINDS)))
    return 0


def init(file: Path | None = None, /) -> None:
    """Write a commented settings file with every key, or print it.

    Args:
        file: where to; it must not exist.
    """
    from mimo.trainer.config.template import example_text

    if file is None:
        print(example_text(), end="")
        return
    if file.exists():
        raise ConfigError(str(file), expected="a new file", got="one that exists", fix="Name another one.")
    file.write_text(example_text(), encoding="utf-8")


def _tell(text: str) -> None:
    """Print an error once: under torchrun each process meets the same one, and the first of a machine tells it."""
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
        sys.stderr.write(f"{plain_text(text)}\n")
        sys.stderr.flush()
    else:
        time.sleep(_TOLD_SECONDS)  # torchrun ends all when the first one exits, which must not be before it was told
