"""The built-in lifecycle plugins: metrics and console."""

from __future__ import annotations

import errno
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from mimo.hooks import (
    DataError,
    EdgeTraffic,
    EvaluationInfo,
    Flops,
    RunError,
    RunInfo,
    StepInfo,
    lifecycle,
    read_metrics,
)
from mimo.launch.process import run_lock as _run_lock
from mimo.trainer.report import metrics as _metrics
from mimo.trainer.report.console import Progress, show_seconds, show_text
from mimo.trainer.report.metrics import Metrics
from mimo.trainer.run import end as _run_end

STEP = StepInfo(
    step=1,
    loss=2.5,
    grad_norm=1.0,
    lr=1e-3,
    label_tokens=4,
    rows={"vision": 16},
    norms={"vision": 0.6, "language": 0.8},
    seconds=0.5,
    module_seconds={"vision": 0.1},
    tokens_per_second=1234.0,
    truncated=0,
    skipped=False,
    data_seconds=0.25,
)
EVALUATION = EvaluationInfo(step=3, loss=0.25, exact_match=0.975, samples=40, losses={"tutor": 0.5})


def make_run(directory: Path, *, rank: int = 0, first_step: int = 1, **logging: Any) -> RunInfo:
    """Return a run of three steps."""
    return RunInfo(
        name="r",
        directory=directory,
        rank=rank,
        world=2,
        first_step=first_step,
        steps=3,
        config={"logging": {"console": True, "interval": 2, **logging}, "checkpoint": {"load": "none"}},
    )


def go_through(plugin: object, run: RunInfo) -> None:
    """Call a plugin as a run from its first step to its last would."""
    caller = lifecycle([plugin], entry_points=())
    caller.run_begin(run)
    for step in range(run.first_step, run.steps + 1):
        caller.step_begin(run, step)
        caller.step_end(run, attrs.evolve(STEP, step=step, loss=2.5 / step))
    caller.evaluated(run, EVALUATION)
    caller.run_end(run)


def test_metrics_are_one_object_a_line(tmp_path: Path) -> None:
    """Steps with everything that is known, evaluations marked as such."""
    go_through(Metrics(), make_run(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert lines[0]["norms"] == {"vision": 0.6, "language": 0.8}
    assert lines[0]["data_seconds"] == 0.25
    shown = {"step": 3, "evaluation": True, "loss": 0.25, "exact_match": 0.975, "samples": 40}
    assert lines[3] == {**shown, "losses": {"tutor": 0.5}}


def test_metrics_have_edges_experts_and_further_losses_only_where_there_are_any(tmp_path: Path) -> None:
    """Lists of edges are by rank; a step that has none of these has no key for them."""
    run, traffic = make_run(tmp_path), {field.name: (3, 0) for field in attrs.fields(EdgeTraffic)}
    Metrics().mimo_step_end(run, STEP)
    printed = attrs.evolve(STEP, edges={"vision->language": EdgeTraffic(**traffic)}, losses={"balance": 0.5})
    Metrics().mimo_step_end(run, printed)
    plain, more = read_metrics(tmp_path / "metrics.jsonl")
    assert more.keys() - plain.keys() == {"edges", "losses"}
    assert more["edges"]["vision->language"]["gradient_rows_sent"] == [3, 0]
    assert set(more["edges"]["vision->language"]) == {
        *("rows_sent", "bytes_sent", "rows_in_place", "gradient_rows_sent", "gradient_bytes_sent")
    }


def test_metrics_have_the_loss_scale_where_there_is_one(tmp_path: Path) -> None:
    """A run in another precision than fp16 has none."""
    run = make_run(tmp_path)
    for info in (STEP, attrs.evolve(STEP, loss_scale=1024.0)):
        Metrics().mimo_step_end(run, info)
    plain, scaled = read_metrics(tmp_path / "metrics.jsonl")
    assert "loss_scale" not in plain
    assert scaled["loss_scale"] == 1024.0


def test_metrics_have_named_clip_groups_and_zero_gradients_on_request(tmp_path: Path) -> None:
    """Otherwise they have no keys for them."""
    run = make_run(tmp_path)
    for info in (STEP, attrs.evolve(STEP, group_norms={"heads": 0.5}, zero_gradients={"vision": 3})):
        Metrics().mimo_step_end(run, info)
    plain, printed = read_metrics(tmp_path / "metrics.jsonl")
    assert printed.keys() - plain.keys() == {"group_norms", "zero_gradients"}
    assert (printed["group_norms"], printed["zero_gradients"]) == ({"heads": 0.5}, {"vision": 3})


def test_shares_of_a_peak_that_nobody_knows_are_left_out(tmp_path: Path) -> None:
    """The operations of modules are logged without it."""
    run, known = make_run(tmp_path), dict.fromkeys(("model_operations", "hardware_operations"), 6.0)
    known |= {"model_flops": 3.0, "hardware_flops": 3.0}
    for shares in ({}, {"mfu": 0.5, "hfu": 0.75}):
        Metrics().mimo_step_end(run, attrs.evolve(STEP, flops={"vision": Flops(**known, **shares)}))
    without, printed = read_metrics(tmp_path / "metrics.jsonl")
    assert without["flops"] == {"vision": known}
    assert printed["flops"] == {"vision": {**known, "mfu": 0.5, "hfu": 0.75}}


def test_metrics_are_json_where_numbers_are_not_finite(tmp_path: Path) -> None:
    """JSON has no NaN: null replaces it."""
    caller, run = lifecycle([Metrics()], entry_points=()), make_run(tmp_path)
    caller.run_begin(run)
    caller.step_end(run, STEP)
    caller.step_end(run, attrs.evolve(STEP, step=2, loss=float("nan"), norms={"vision": float("inf")}))
    caller.run_end(run)
    line = read_metrics(tmp_path / "metrics.jsonl")[1]
    assert (line["loss"], line["norms"]) == (None, {"vision": None})


def test_a_disk_that_is_full_loses_lines_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported once; a line that was cut off is taken back, so that the lines after it can be read."""
    run, metrics, write = make_run(tmp_path), Metrics(), io.FileIO.write

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if len(data) < 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(self, data[:-10])

    metrics.mimo_step_end(run, STEP)
    with monkeypatch.context() as context:
        context.setattr(Path, "open", lambda path, mode, **_keys: Full(path, mode.replace("b", "")))
        for step in (2, 3):
            metrics.mimo_step_end(run, attrs.evolve(STEP, step=step))
    metrics.mimo_step_end(run, attrs.evolve(STEP, step=4))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4]
    assert capsys.readouterr().err == (
        f"mimo: {tmp_path / 'metrics.jsonl'}: expected to write step 2, got [Errno 28] No space left on device. The "
        "run goes on; lines are lost until it can be written again.\n"
    )


class Full(io.StringIO):
    """Standard error on a disk that is full."""

    def write(self, _text: str, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def _report_failure(text: str) -> None:
    _run_end.report_failures([DataError(text, expected="it", got="none")])


@pytest.mark.parametrize("report", [_metrics._report, _run_lock._warn, _report_failure])
def test_messages_that_cannot_be_printed_end_nothing(
    report: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that can reach no terminal raw."""
    report("a\x1bb")
    assert "a\\x1bb" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", Full())
    report("a")


def test_only_rank_0_writes_metrics(tmp_path: Path) -> None:
    """All ranks know the same."""
    go_through(Metrics(), make_run(tmp_path, rank=1))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_resumed_run_drops_what_was_written_of_the_steps_to_come(tmp_path: Path) -> None:
    """The file has each step once, also after a line that was cut off."""
    go_through(Metrics(), make_run(tmp_path))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    go_through(Metrics(), make_run(tmp_path, first_step=3))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    "damage",
    [
        bytes(50),
        bytes(50) + b"\n",
        b'{"step": 2, "lo',
        b'{"step": 2, "lo\n',
        b"\xff\xfe\x00garbage\n",
        b"[1, 2]\n3\nnull\n",
        b'{"loss": 1.0}\n{"step": "2", "loss": 1.0}\n{"step": true}\n',
        b'{"step": ' + b"1" * 5000 + b"}\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=["zeros", "line of zeros", "cut", "cut within", "bytes", "other JSON", "no step", "long integer", "nested"],
)
@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_lines_that_cannot_be_read_are_left_out_and_saved_beside(
    damage: bytes, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are reported once, with their last byte; what is on the same line is lost too."""
    go_through(Metrics(), make_run(tmp_path))
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.unreadable"
    lines = path.read_bytes().splitlines(keepends=True)
    at = {"before": 0, "between": 1, "after": len(lines)}[where]
    damaged = [*lines[:at], damage, *lines[at:]]
    path.write_bytes(b"".join(damaged))
    shares_a_line = not damage.endswith(b"\n") and where != "after"
    steps = [1, 2, 3, 3][:at] + [1, 2, 3, 3][at + shares_a_line :]
    assert [line["step"] for line in read_metrics(path)] == steps
    go_through(Metrics(), make_run(tmp_path, first_step=3))
    assert [line["step"] for line in read_metrics(path)] == [step for step in steps if step < 3] + [3, 3]
    alone = damage if damage.endswith(b"\n") else damage + (lines[at] if shares_a_line else b"\n")
    assert aside.read_bytes() == alone
    printed = capsys.readouterr().err
    assert printed.startswith(f"mimo: {path}: expected a JSON object with a step in each line, got ")
    assert printed.endswith(f" left out, and saved in {aside}.\n")
    assert printed.count("\n") == 1
    go_through(Metrics(), make_run(tmp_path, first_step=3))
    assert capsys.readouterr().err == ""
    assert aside.read_bytes() == alone


def test_metrics_that_cannot_be_rewritten_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk: reported, and the old lines are as they were."""
    go_through(Metrics(), make_run(tmp_path))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def refuse(_path: Path, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    Metrics().mimo_run_begin(make_run(tmp_path, first_step=3))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert "expected to drop the lines from step 3 on, got [Errno 28] No space" in capsys.readouterr().err


def test_a_resumed_run_that_is_killed_loses_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is written beside, and takes the place of the old at once."""
    go_through(Metrics(), make_run(tmp_path))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def die(_path: Path, _target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        Metrics().mimo_run_begin(make_run(tmp_path, first_step=3))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def console_text(run: RunInfo, *, terminal: bool) -> str:
    """Return what a run shows."""
    out = io.StringIO()
    go_through(Progress(Console(file=out, force_terminal=terminal, color_system=None, width=70)), run)
    return out.getvalue()


def test_the_console_prints_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    """Every interval, the last step, and evaluations."""
    lines = console_text(make_run(tmp_path), terminal=False).splitlines()
    assert lines[0] == f"r: 3 steps with 2 processes, in {tmp_path}"
    assert [line.partition("  ")[0] for line in lines[1:3]] == ["step 2/3", "step 3/3"]
    assert lines[1] == "step 2/3  loss  1.2500     1,234 tokens/s  0:00 left  data 0.25 s"
    assert lines[3] == "evaluation at step 3: loss 0.2500, tutor 0.5000, 97.5% of 40 samples exactly right"
    assert lines[4] == f"r: done in 0:00, step 3 is saved in {tmp_path}"


def test_the_console_shows_further_losses_beside_that_of_the_labels(tmp_path: Path) -> None:
    """Of generators and teachers, by their names in the metrics."""
    out, run = io.StringIO(), make_run(tmp_path)
    caller = lifecycle([Progress(Console(file=out, width=200))], entry_points=())
    caller.run_begin(run)
    caller.step_end(run, attrs.evolve(STEP, step=2, losses={"drawer.loss": 1.23456, "tutor.divergence": float("nan")}))
    printed = out.getvalue().splitlines()[-1]
    assert printed.startswith("step 2/3  loss  2.5000  drawer.loss 1.2346  tutor.divergence nan     1,234 tokens/s  ")


def test_the_console_says_that_a_run_was_stopped(tmp_path: Path) -> None:
    """A run that ends before its last step got a signal."""
    out, run = io.StringIO(), make_run(tmp_path)
    caller = lifecycle([Progress(Console(file=out, width=100))], entry_points=())
    caller.run_begin(run)
    caller.step_end(run, attrs.evolve(STEP, step=2))
    caller.run_end(run)
    printed = out.getvalue().splitlines()[-1]
    assert printed == "r: stopped as asked, step 2 of 3 is saved, in 0:00; checkpoint.load=latest continues"


def test_the_console_says_where_a_run_resumes(tmp_path: Path) -> None:
    """After a checkpoint, from the start where there is none yet, or that nothing is left."""

    def first_line(run: RunInfo) -> str:
        return console_text(run, terminal=False).splitlines()[0].partition(" with ")[0]

    run = make_run(tmp_path)
    latest = attrs.evolve(run, config={**run.config, "checkpoint": {"load": "latest"}})
    assert first_line(attrs.evolve(latest, first_step=2)) == "r: step 2 to 3"
    assert first_line(latest) == "r: no checkpoint yet, so all 3 steps"
    assert first_line(attrs.evolve(latest, first_step=4)) == "r: nothing left to train, step 3 of 3 was loaded,"


def test_the_console_renews_one_line_on_a_terminal(tmp_path: Path) -> None:
    """Steps between the lines show too, and are wiped out by the next line."""
    text = console_text(make_run(tmp_path), terminal=True)
    assert "data 0.25 s\r\x1b[2Kstep 2/3" in text
    assert "data 0.25 s\nstep 3/3" in text


def test_the_console_is_silent_elsewhere_and_where_it_is_switched_off(tmp_path: Path) -> None:
    """On rank 0 only, and only if asked for."""
    assert console_text(make_run(tmp_path, rank=1), terminal=False) == ""
    assert console_text(make_run(tmp_path, console=False), terminal=False) == ""


def test_a_resumed_run_says_where_it_begins_and_skipped_steps_are_marked(tmp_path: Path) -> None:
    """The console prints what differs from an ordinary line, and why a step is skipped whose loss is finite."""
    assert "r: step 2 to 3 with 2 processes" in console_text(make_run(tmp_path, first_step=2), terminal=False)
    out = io.StringIO()
    caller = lifecycle([Progress(Console(file=out, width=60))], entry_points=())
    caller.step_end(make_run(tmp_path), attrs.evolve(STEP, step=2, skipped=True))
    assert out.getvalue().endswith("(skipped)\n")
    for loss, end in ((0.0, "(skipped, as no token is learned)\n"), (math.nan, "(skipped)\n")):
        caller.step_end(make_run(tmp_path), attrs.evolve(STEP, step=2, skipped=True, label_tokens=0, loss=loss))
        assert out.getvalue().endswith(end)


def test_samples_that_are_cut_are_reported_once(tmp_path: Path) -> None:
    """In the first step that has any, whether its line is due or not; metrics count them in each."""
    out = io.StringIO()
    caller = lifecycle([Progress(Console(file=out, width=100))], entry_points=())
    for step, cut in ((1, 0), (2, 5), (3, 4)):
        caller.step_end(make_run(tmp_path), attrs.evolve(STEP, step=step, truncated=cut))
    printed = [line for line in out.getvalue().splitlines() if "cut" in line]
    assert printed == ["r: data.max_tokens cuts samples, 5 in step 2"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_times_are_short(seconds: float, text: str) -> None:
    """Hours only where there are some."""
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), UnicodeEncodeError("ascii", "ö", 0, 1, "none")],
    ids=type,
)
def test_text_that_nobody_takes_ends_the_writing_in_words(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a disk that is full, or a terminal without its letters."""

    def refuse(_self: io.StringIO, _text: str) -> int:
        raise error

    monkeypatch.setattr("sys.stdout", type("Closed", (io.StringIO,), {"write": refuse})())
    with pytest.raises(RunError, match="standard output: expected to be read to the end, got "):
        show_text("zwölf")
