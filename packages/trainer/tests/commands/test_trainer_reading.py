"""What `mimo check` says of the time in which a rank reads a step's samples."""

from __future__ import annotations

import itertools
import json
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
READING = ReadingTime(samples=4, tokens=20, seconds=2.0, encoded=True)
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
    assert found is not None
    assert attrs.astuple(found) == (64, 64 * 5, pytest.approx(0.064), True)
    lines = [{"text": "four" if sample % 2 else "longer than eight"} for sample in range(64)]
    (Path(file).parent / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = ReadingTime.of(opened(file, *BY_TOKENS, "data.longer=drop"), ticking(0.001))
    assert found is not None
    assert attrs.astuple(found) == (32, 32 * 5, pytest.approx(0.064), True)


def test_no_sample_is_begun_after_a_second(file: str) -> None:
    """However long one takes, the command ends soon."""
    found = ReadingTime.of(opened(file), ticking(0.4))
    assert found is not None
    assert found.samples == 3


def test_nothing_is_said_where_no_sample_can_be_read(file: str) -> None:
    """The step that needs one raises."""
    (Path(file).parent / "train.jsonl").write_text("{\n" * 8)
    assert ReadingTime.of(opened(file)) is None


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
