"""What `mimo check` says of the time in which a rank reads a step's samples."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from mimo.trainer.commands.tables.reading import ReadingTime, show_reading
from mimo.trainer.config.toml import read_settings
from mimo.trainer.cost.profile import VERSION, LinearTime, Profile, StageTimes, digest, layout_of, machine
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import resolve

SETTINGS = """
[run]
name = "text"
steps = 2
global_batch = 8
directory = "{directory}/run"
[data]
plugin = "jsonl"
path = "{directory}/train.jsonl"
max_tokens = 8
[modules.language]
plugin = "decoder"
ranks = "0-1"
config = {{ hidden = 16, layers = 2, heads = 2, intermediate = 16 }}
"""
READING = ReadingTime(samples=4, tokens=20, labels=16, cut=0, seconds=2.0, encoded=True)
"""Half a second a sample: 4 s for a step of 8."""
BY_TOKENS = ("run.global_batch=0", "run.batch_tokens=64", "run.micro_tokens=16")
ADVICE = "`mimo data index FILE --tokens` keeps the ids, so that no text is encoded in a run"


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A settings file, and 100 texts of 5 ids."""
    (tmp_path / "train.jsonl").write_text('{"text": "four"}\n' * 100)
    path = tmp_path / "text.toml"
    path.write_text(SETTINGS.format(directory=tmp_path))
    return str(path)


def opened(file: str, *overrides: str) -> Job:
    """Return the job."""
    return resolve(read_settings(Path(file), overrides))


def ticking(seconds: float) -> Callable[[], float]:
    """Return a clock that is later by so much at each look."""
    looks = itertools.count()
    return lambda: next(looks) * seconds


def test_the_time_is_of_samples_that_are_laid_out(file: str) -> None:
    """All are read for what they take, and those that are left out, as too long, count for no step."""
    found = ReadingTime.of(opened(file), ticking(0.001))
    assert attrs.astuple(found) == (64, 64 * 5, 64 * 4, 0, pytest.approx(0.064), True, [])
    lines = [{"text": "four" if sample % 2 else "longer than eight"} for sample in range(64)]
    (Path(file).parent / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = ReadingTime.of(opened(file, *BY_TOKENS, "data.longer=drop"), ticking(0.001))
    assert attrs.astuple(found) == (32, 32 * 5, 32 * 4, 0, pytest.approx(0.064), True, [])


def test_no_sample_is_begun_after_a_second(file: str) -> None:
    """However long one takes, the command ends soon."""
    found = ReadingTime.of(opened(file), ticking(0.4))
    assert found.samples == 3


def test_samples_that_can_not_be_read_are_counted(file: str) -> None:
    """With what is wrong with the first one, as the step that needs it ends the run."""
    data = Path(file).parent / "train.jsonl"
    for right in (0, 16):
        data.write_text('{"txt": "four"}\n' * 48 + '{"text": "four"}\n' * right)
        job = opened(file)
        first, *others = show_reading(job, ReadingTime.of(job))
        wrong = rf"{re.escape(str(data))}:\d+: expected only the keys .*, got 'txt'\. Did you mean 'text'\?"
        count = 48 if right else 64
        assert re.fullmatch(f"{count} of 64 samples that were looked at can't be read: {wrong}", first)
        assert bool(others) is bool(right)


def test_samples_that_are_all_left_out_are_said_to_be_so(file: str) -> None:
    """By the settings that do it."""
    (Path(file).parent / "train.jsonl").write_text('{"text": "longer than eight"}\n' * 8)
    job = opened(file, *BY_TOKENS, "data.longer=drop")
    (line,) = show_reading(job, ReadingTime.of(job))
    assert line.endswith("is trained on: data.longer drops all, longer than data.max_tokens")


@pytest.mark.parametrize(("answer", "cuts"), [("four", False), ("longer than eight", True)])
def test_samples_of_which_nothing_is_learned_are_said_to_be_such(answer: str, cuts: bool, file: str) -> None:
    """Since they count nothing, or since they lose what is learned where they are cut."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    lines = [{"messages": turns, "weight": 1 if cuts else 0}] * 8
    (Path(file).parent / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    job = opened(file, "data.chat.template=chatml", f"data.max_tokens={60 if cuts else 100}")
    cut = "; data.max_tokens cuts 64 of them" if cuts else ""
    said = f"no token of the 64 samples that were looked at is learned{cut}: steps of such samples are skipped. "
    first, *others = show_reading(job, ReadingTime.of(job))
    assert first == f"{said}`mimo data show FILE` shows what of a sample is learned"
    assert others
    job = opened(file, "data.chat.template=chatml", "data.max_tokens=200")
    assert next(show_reading(job, ReadingTime.of(job))).startswith("no token") is not cuts


def test_a_run_is_bounded_by_what_it_reads(file: str) -> None:
    """By samples and by tokens a second; steps by tokens have as many samples as these are long."""
    said = (
        "each rank reads all 8 samples of a step, whose texts it encodes, in 4 s, as measured on 4 samples here: "
        "a run reads at most 2 samples or 10 tokens a second"
    )
    assert list(show_reading(opened(file), READING)) == [said, ADVICE]
    of_tokens = said.replace("all 8", "all 12.8").replace("in 4 s", "in 6.4 s")
    assert next(show_reading(opened(file, *BY_TOKENS), READING)) == of_tokens


def test_data_that_have_no_index_need_no_advice(file: str) -> None:
    """Such as samples that are drawn."""
    text = Path(file).read_text()
    begin, end = text.index("[data]"), text.index("[modules.language]")
    Path(file).write_text(f'{text[:begin]}[data]\nplugin = "mock"\nimages = 0\n{text[end:]}')
    (line,) = show_reading(opened(file), READING)
    assert "whose texts it encodes" in line


@pytest.mark.parametrize(("forward", "share", "step", "advised"), [(2.0, "0.25", 16, True), (2.5, "0.222", 18, False)])
def test_by_a_profile_advice_is_given_where_the_step_is_not_much_longer(
    forward: float, share: str, step: int, advised: bool, file: str, tmp_path: Path
) -> None:
    """Four seconds for reading, four microbatches whose backward takes two: a quarter of the step matters."""
    job, second = opened(file), LinearTime(fixed=1.0, sample=0.0)
    times = StageTimes(
        module="language",
        stage=0,
        forward=LinearTime(fixed=forward, sample=0.0),
        input_gradient=second,
        weight_gradient=second,
    )
    profile = Profile(
        version=VERSION,
        machine=machine("cpu", "2"),
        settings=digest(job),
        micro_batch=1,
        modules=layout_of(job),
        stages=(times,),
        edges=(),
    )
    path = tmp_path / "costs.json"
    path.write_text(profile.to_json())
    _, *lines = show_reading(opened(file, f"schedule.profile={path}"), READING)
    said = f"that is {share} of the {step} s of a step, simulated by the profile {path}"
    assert lines == [said, *([ADVICE] if advised else [])]
