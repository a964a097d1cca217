"""The launcher with real processes and real signals, each time in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from mimo.launch import ProcessInfo
from mimo.launch.runtime import Meeting, Terms, start_method
from mimo.launch.start.launcher import _processes
from mimo.testing import Started, free_port, processes, script

HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from mimo.hooks import ConfigError, DataError, UserError
from mimo.launch.faults import fault as _fault
from functools import partial
from mimo.launch.runtime import launch
from mimo.launch.runtime import Terms, Watchdog
from mimo.trainer.resume.attempt import forget_failure, note_failure

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests

def together():
    found = torch.ones(())
    dist.all_reduce(found)
    return int(found)

def say(*what):
    sys.stdout.write(" ".join(map(str, what)) + "\\n")  # at once, also where Python writes unbuffered
    sys.stdout.flush()

def entry(place):
"""
TAIL = """
if __name__ == "__main__":
    directory = Path({directory!r})
    at_end, at_start = partial(note_failure, directory), partial(forget_failure, directory)
    terms = Terms(on_failure=at_end, on_start=at_start, timeout={timeout}, stops={stops})
    sys.exit(launch(entry, world={world}, method={method!r}, terms=terms))
"""
BLOCKED = """
    together()
    if place.rank:
        together()  # rank 0 never comes
    print("ready", flush=True)
    signal.pause()
"""


@contextlib.contextmanager
def start(
    tmp_path: Path,
    body: str,
    environ: Mapping[str, str] | None = None,
    *,
    world: int = 3,
    method: str = "fork",
    timeout: float = 600,
    stops: bool = False,
    fresh: bool = False,
) -> Iterator[Started]:
    """Start a program that launches ``body`` in each rank, in a fresh interpreter if asked or if the ranks are."""
    program = tmp_path / "program.py"
    program.write_text(
        HEAD + body + TAIL.format(world=world, method=method, directory=str(tmp_path), timeout=timeout, stops=stops)
    )
    if fresh or method == "spawn":
        with processes.start(program=(sys.executable, program), environ=environ) as started:
            yield started
    else:
        with processes.start(call=partial(script, str(program)), environ=environ) as started:
            yield started


def finish(started: Started) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr, when every process that shares these has ended."""
    ended = started.wait()
    return ended.code, ended.out, ended.err


def launched(tmp_path: Path, body: str, **how: Any) -> tuple[int, str, str]:
    """Start a program, and return what `finish` does."""
    with start(tmp_path, body, **how) as started:
        return finish(started)


def join(tmp_path: Path, body: str, world: int, *, shared: bool = False, **how: Any) -> list[tuple[int, str, str]]:
    """Start each rank by itself, as torchrun and Slurm do, and return what `finish` does by rank."""
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            directory = tmp_path if shared else tmp_path / str(rank)
            directory.mkdir(exist_ok=True)
            environ = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks.append(stack.enter_context(start(directory, body, environ, **how)))
        return [finish(one) for one in ranks]


def is_free(port: int) -> bool:
    """Tell whether nobody listens on a port of this machine."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def test_all_ranks_meet_and_the_exit_code_is_0(tmp_path: Path) -> None:
    """Every rank gets its place and a process group."""
    body = """
    assert (place.rank, place.world, place.device) == (dist.get_rank(), 3, "cpu")
    if together() == 3 and place.rank == 2:
        print("met")
"""
    assert launched(tmp_path, body, fresh=True) == (0, "met\n", "")
    assert not (tmp_path / "error.txt").exists()


def test_one_ranks_data_error_ends_all_with_3_and_is_shown_once_without_traceback(tmp_path: Path) -> None:
    """The others wait in a collective for a rank that never comes, and end all the same."""
    body = """
    together()
    if place.rank == 1:
        raise DataError("train.jsonl:12", expected="an image that can be read", got="'a.png'")
    together()
"""
    code, out, err = launched(tmp_path, body)
    told = "rank 1: train.jsonl:12: expected an image that can be read, got 'a.png'.\n"
    assert (code, out, err) == (3, "", f"mimo: {told}")
    assert (tmp_path / "error.txt").read_text() == told


def test_text_that_nobody_reads_on_ends_all_ranks_without_a_word(tmp_path: Path) -> None:
    """As other tools end after `| head`, while the others wait in a collective."""
    body = """
    from mimo.trainer.report.console import show_text
    together()
    if place.rank == 0:
        reads, writes = os.pipe()
        os.dup2(writes, 1)
        os.close(reads)
        show_text("a word")
    together()
"""
    assert launched(tmp_path, body) == (141, "", "")
    assert not (tmp_path / "error.txt").exists()


def test_an_unexpected_error_shows_its_traceback_once_and_names_the_rank_last(tmp_path: Path) -> None:
    """A bug is shown with where it happened."""
    body = """
    together()
    if place.rank == 2:
        raise KeyError("lost")
    together()
"""
    code, _, err = launched(tmp_path, body)
    assert code == 3
    assert err.count("Traceback (most recent call last)") == 1
    assert err.endswith("rank 2 failed: KeyError: 'lost'\n")


def test_an_error_before_the_ranks_met_ends_the_others_too(tmp_path: Path) -> None:
    """A rank that other ranks wait for in start-up is told of like any other, with its own exit code."""
    body = """
    if place.rank == 0:
        raise ConfigError("run.seed", expected="luck", got="none")
    together()
"""
    code, _, err = launched(tmp_path, body)
    assert (code, err) == (2, "mimo: rank 0: run.seed: expected luck, got none.\n")


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    """What the other ranks suffer from it is not told as the cause."""
    body = """
    together()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    together()
"""
    code, _, err = launched(tmp_path, body)
    assert code == 3
    assert err.startswith("mimo: rank 1 was ended by signal 9 (SIGKILL).")
    assert err.count("\n") == 1
    assert "rank 1 was ended by signal 9" in (tmp_path / "error.txt").read_text()


def test_a_rank_that_exits_without_a_reason_is_named(tmp_path: Path) -> None:
    """A library that ends the process does not go unnoticed."""
    body = """
    together()
    if place.rank == 1:
        os._exit(7)
    signal.pause()
"""
    code, _, err = launched(tmp_path, body)
    assert (code, err) == (3, "mimo: rank 1 ended with exit code 7 and without a reason.\n")


@pytest.mark.parametrize("blocks", [False, True], ids=["refuses", "doesn't answer"])
def test_a_reason_that_cannot_be_written_is_told_all_the_same(blocks: bool, tmp_path: Path) -> None:
    """Whether a run directory is full, or never answers: here the file is a folder, or a pipe that nobody reads."""
    make = "os.mkfifo" if blocks else "os.mkdir"
    body = f"""
    together()
    if place.rank == 1:
        {make}({str(tmp_path / "error.txt")!r})
        raise DataError("train.jsonl:12", expected="an image", got="none")
    together()
"""
    code, _, err = launched(tmp_path, body)
    assert (code, err) == (3, "mimo: rank 1: train.jsonl:12: expected an image, got none.\n")


def test_fresh_interpreters_meet_and_end_as_forked_processes_do(tmp_path: Path) -> None:
    """Spawned, each rank reads its task and place from plain bytes; the first error ends all and is told once."""
    body = """
    assert __name__ == "__mp_main__" and place.local_rank == place.rank
    assert together() == 2
    if place.rank == 1:
        raise DataError("train.jsonl:7", expected="text", got="none")
    together()
"""
    code, out, err = launched(tmp_path, body, world=2, method="spawn")
    told = "rank 1: train.jsonl:7: expected text, got none.\n"
    assert (code, out, err) == (3, "", f"mimo: {told}")
    assert (tmp_path / "error.txt").read_text() == told


def test_ctrl_c_while_fresh_interpreters_import_is_silent(tmp_path: Path) -> None:
    """They take seconds to begin, in which a signal must leave neither processes nor their tracebacks."""
    with start(tmp_path, BLOCKED, world=2, method="spawn") as started:
        while len(started.workers()) < 3:  # and the tracker of their resources
            pass
        os.killpg(started.pid, signal.SIGINT)
        code, _, err = finish(started)
        assert (code, err) == (130, "mimo: interrupted\n")


def test_each_process_has_a_gpu_of_its_own() -> None:
    """The number of the process on this machine is that of its GPU; fresh interpreters inherit no socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reads, writes = Pipe(duplex=False)
        processes = _processes(print, 2, "cuda", start_method("cuda"), Terms(), reads, (listener, writes))
    arguments = [vars(process)["_args"] for process in processes]
    assert [place for _, place, *_ in arguments] == [
        ProcessInfo(rank=rank, world=2, local_rank=rank, device=f"cuda:{rank}") for rank in (0, 1)
    ]
    assert [inherited for *_, inherited in arguments] == [(), ()]


def test_a_program_may_hand_over_how_its_processes_meet(tmp_path: Path) -> None:
    """Where each computes and by what backend they send; the latter is asked in the rank, before it has a group."""
    program = tmp_path / "meets.py"
    program.write_text(
        HEAD
        + """
    say(place.device, dist.get_backend(), together())

def backend(device):
    assert not dist.is_initialized() and device == "cpu"
    dist.Backend.register_backend("ours", dist.ProcessGroupGloo, devices=["cpu"])
    return "ours"

def device(name, local_rank):
    return name

if __name__ == "__main__":
    from mimo.launch.runtime import Meeting
    sys.exit(launch(entry, world=2, meeting=Meeting(device=device, backend=backend)))
"""
    )
    with processes.start(str(program), call=script) as started:
        code, out, err = finish(started)
    assert (code, sorted(out.splitlines()), err) == (0, ["cpu ours 2", "cpu ours 2"], "")


def test_where_ranks_meet_as_usual() -> None:
    """A GPU for each, with NCCL for what lies there; gloo alone on the CPU."""
    usual = Meeting()
    assert [usual.device(name, 3) for name in ("cpu", "cuda")] == ["cpu", "cuda:3"]
    assert [usual.backend(device) for device in ("cpu", "cuda:3")] == ["gloo", "nccl"]


def test_ctrl_c_ends_every_process_with_130_and_no_traceback(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group, ranks in a collective included."""
    with start(tmp_path, BLOCKED) as started:
        started.wait_for("ready")
        os.killpg(started.pid, signal.SIGINT)
        code, _, err = finish(started)
        assert (code, err) == (130, "mimo: interrupted\n")


def test_sigterm_to_the_launcher_alone_ends_every_process_with_143(tmp_path: Path) -> None:
    """What batch systems send to the process that they know."""
    with start(tmp_path, BLOCKED) as started:
        started.wait_for("ready")
        started.process.terminate()
        code, _, err = finish(started)
        assert (code, err) == (143, "mimo: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_task_that_knows_sigterm_is_told_and_ends_by_itself(number: int, tmp_path: Path) -> None:
    """Also where the main thread is in a collective; sent to the group it comes twice, which is one wish."""
    body = """
    together()
    if place.rank:
        together()
    else:
        print("ready", flush=True)
        while not place.progress.stops:
            time.sleep(0.01)
        together()
    until = time.monotonic() + 60
    while not place.progress.stops and time.monotonic() < until:
        time.sleep(0.01)
    assert place.progress.stops
"""
    with start(tmp_path, body, stops=True) as started:
        started.wait_for("ready")
        os.killpg(started.pid, number)
        told = "mimo: asked to stop: the step is finished and saved. A second signal ends all at once.\n"
        assert finish(started) == (0, "ready\n", told)


def test_a_second_sighup_is_the_same_wish(tmp_path: Path) -> None:
    """A terminal that goes may send several, to the launcher and to all ranks."""
    go = tmp_path / "go"
    body = f"""
    together()
    if place.rank == 0:
        say("ready")
    while not place.progress.stops:
        time.sleep(0.01)
    while not Path({str(go)!r}).exists():
        time.sleep(0.01)
    together()
"""
    with start(tmp_path, body, stops=True, world=2) as started:
        started.wait_for("ready")
        os.killpg(started.pid, signal.SIGHUP)
        time.sleep(1.5)  # sooner it would be the same wish
        os.killpg(started.pid, signal.SIGHUP)
        go.touch()
        told = "mimo: asked to stop: the step is finished and saved. A second signal ends all at once.\n"
        assert finish(started) == (0, "ready\n", told)


def test_a_terminal_that_goes_does_not_end_what_nohup_started(tmp_path: Path) -> None:
    """Neither at once nor after the step: the signal was ignored when the command began."""
    body = """
    together()
    if place.rank == 0:
        os.killpg(os.getpgrp(), signal.SIGHUP)
    until = time.monotonic() + 1
    while not place.progress.stops and time.monotonic() < until:
        time.sleep(0.01)
    say(place.progress.stops, together())

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
"""
    assert launched(tmp_path, body, stops=True, world=2) == (0, "False 2\n" * 2, "")


def test_a_run_whose_terminal_is_closed_ends_by_itself(tmp_path: Path) -> None:
    """Though nothing that it prints can be written any more."""
    master, slave = os.openpty()
    told = tmp_path / "told"
    body = f"""
    from mimo.trainer.report.console import Progress
    console = Progress()
    together()
    while not place.progress.stops:
        if place.rank == 0:
            console._line("a step")
        time.sleep(0.01)
    if place.rank == 0:
        console._line("saved")
        Path({str(told)!r}).write_text(str(together()))
    else:
        together()

if __name__ == "__main__":
    terminal = os.open({os.ttyname(slave)!r}, os.O_RDWR)  # that of this session from now on
    for number in (0, 1, 2):
        os.dup2(terminal, number)
"""
    with os.fdopen(master, "rb", buffering=0) as screen, start(tmp_path, body, stops=True, world=2) as started:
        shown = b""
        while b"a step" not in shown:
            shown += screen.read(1 << 10)
        os.close(slave)
        screen.close()
        assert finish(started)[0] == 0
    assert told.read_text() == "2"


@pytest.mark.parametrize("again", [False, True])
def test_one_that_takes_too_long_is_ended(again: bool, tmp_path: Path) -> None:
    """When it has taken as long as a run may stand still, or is asked again."""
    with start(tmp_path, BLOCKED, stops=True, timeout=600 if again else 1) as started:
        started.wait_for("ready")
        started.process.terminate()
        if again:
            time.sleep(1.5)  # sooner it would be the same wish
            started.process.terminate()
        code, _, err = finish(started)
        assert (code, err.splitlines()[-1]) == (143, "mimo: interrupted")


def test_a_rank_that_hangs_when_others_have_ended_is_named(tmp_path: Path) -> None:
    """They don't answer any more, and are not taken for dead."""
    body = """
    place.progress.enter("the test")
    together()
    if place.rank == 1:
        time.sleep(1000)
"""
    code, _, err = launched(tmp_path, body, timeout=3)
    assert code == 3
    found = re.fullmatch(r"mimo: rank 1 did not go on for .* s in the test, at (.*), line .*", err.strip())
    assert found is not None, err
    assert found[1] == "__main__"


def test_tasks_of_srun_meet_without_being_told_where(tmp_path: Path) -> None:
    """On a port that follows from the ids of their job and step."""
    job = next(job for job in range(os.getpid(), os.getpid() + 1000) if is_free(20_000 + job * 61 % 10_000))
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "gpu01"}
    body = """
    print(together(), place.rank, place.local_rank)
"""
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in ("0", "1"):
            (tmp_path / rank).mkdir()
            task = {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            ranks.append(stack.enter_context(start(tmp_path / rank, body, task)))
        assert [finish(one) for one in ranks] == [(0, "2 0 0\n", ""), (0, "2 1 1\n", "")]


def test_joined_ranks_name_one_that_died(tmp_path: Path) -> None:
    """Where no launcher of ours sees it: who loses a connection asks all, and one doesn't answer."""
    body = """
    told, put_up = threading.Event(), Watchdog._put_up
    place.progress.enter("the test")
    Watchdog._put_up = lambda watch: (put_up(watch), told.set())
    together()
    if place.rank == 2:
        assert told.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    together()
"""
    ended = join(tmp_path, body, 3)
    assert [code for code, _, _ in ended] == [3, 3, -signal.SIGKILL]
    (told,) = (err for _, _, err in ended if err)
    assert told.endswith(
        "rank 2 no longer answers: it was killed or stopped, or a machine or its network is gone. "
        "Rank 2 was last heard of in the test.\n"
    ), told
    assert "Traceback" not in told


def test_joined_ranks_say_that_the_one_in_which_all_meet_is_gone(tmp_path: Path) -> None:
    """Rank 1 says so, as nobody is left to agree with."""
    body = """
    place.progress.enter("the test")
    together()
    if place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""
    ended = join(tmp_path, body, 3)
    assert [code for code, _, _ in ended] == [-signal.SIGKILL, 3, 3]
    told = "mimo: The process in which all ranks meet is gone: rank 0, or what started it. Rank 1 was in the test.\n"
    assert ended[1][2].endswith(told)  # after what torch says of the lost connection
    assert "mimo:" not in ended[2][2]


def test_a_rank_that_can_start_no_thread_says_why_at_once(tmp_path: Path) -> None:
    """Though a thread is what writes its reason to the run directory."""
    body = """
    together()
    if place.rank == 1:
        def refuse(thread):
            raise RuntimeError("can't start new thread")
        threading.Thread.start = refuse
        threading.Thread().start()
    together()
"""
    code, _, err = launched(tmp_path, body)
    assert code == 3
    limits = "ulimit -u and -v, pids.max of its control group, host memory"
    told = f"rank 1 can't start another thread or process (see {limits})"
    assert err.splitlines()[-1] == f"{told}: RuntimeError: can't start new thread"
    assert told in (tmp_path / "error.txt").read_text()


def test_a_rank_that_cannot_be_watched_ends_all(tmp_path: Path) -> None:
    """The first thread of a rank is the one that watches."""
    body = """
    together()

def refuse(watch):
    if watch._place.rank == 1:
        raise RuntimeError("can't start new thread")
    threading.Thread.start(watch)

Watchdog.start = refuse
"""
    code, _, err = launched(tmp_path, body)
    assert code == 3
    assert err.splitlines()[-1].startswith("rank 1 can't start another thread or process"), err


def test_a_rank_that_ends_itself_for_want_of_memory_says_so(tmp_path: Path) -> None:
    """As C++ does where an allocation or a thread is refused: all that is left of it is the signal."""
    body = """
    import mmap
    together()
    if place.rank == 1:
        kept = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
        time.sleep(2.5)  # in which the launcher looks at it
        os.abort()
    together()

import resource
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (5 << 38, resource.RLIM_INFINITY))
"""
    code, _, err = launched(tmp_path, body)
    assert code == 3
    told = "mimo: rank 1 was ended by signal 6 (SIGABRT). It is out of host memory: it had 10"
    assert err.splitlines()[-1].startswith(told), err


def test_a_killed_launcher_leaves_no_rank_behind_and_one_line(tmp_path: Path) -> None:
    """What is lost with it is told once, without frames; `finish` returns only when all ranks are gone."""
    body = BLOCKED.replace("together()", 'place.progress.enter("the test")\n    together()', 1)
    with start(tmp_path, body) as started:
        started.wait_for("ready")
        started.process.kill()
        told = "The process that started all ranks is gone. Rank 0 was in the test.\n"
        assert finish(started) == (-signal.SIGKILL, "ready\n", f"mimo: {told}")
    assert (tmp_path / "error.txt").read_text() == told


def listening(pids: Sequence[int]) -> set[str]:
    """Return the addresses on which processes listen, or from which they have connected, as text."""
    sockets = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(str(path.readlink()))
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in sockets:
                raw = bytes.fromhex(words[1].partition(":")[0])
                # Each four bytes are a number in the machine's order.
                turned = b"".join(
                    raw[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, len(raw), 4)
                )
                found.add(socket.inet_ntop(family, turned))
    return found


def own_address() -> str:
    """Return an address of this machine other than where local runs meet; that of its network, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.2"


def test_gloo_is_handed_the_loopback_of_local_runs(tmp_path: Path) -> None:
    """Whatever the environment of the command says, which is meant for runs on several machines."""
    body = """
    name = os.environ["GLOO_SOCKET_IFNAME"]
    is_loopback = int(Path(f"/sys/class/net/{name}/flags").read_text(), 16) & 8  # IFF_LOOPBACK
    assert os.environ["NCCL_SOCKET_IFNAME"] == name
    say(together(), bool(is_loopback))
"""
    elsewhere = {"GLOO_SOCKET_IFNAME": "none0", "NCCL_SOCKET_IFNAME": "none0"}
    assert launched(tmp_path, body, environ=elsewhere, world=2) == (0, "2 True\n" * 2, "")


def test_local_runs_are_reached_from_this_machine_alone(tmp_path: Path) -> None:
    """Whatever the host's name resolves to: the first group, later ones, meshes, and those of checkpoints."""
    body = f"""
    from mimo.checkpoint._ranks import Ranks
    from torch.distributed.device_mesh import DeviceMesh

    together()
    later, own = dist.new_group([0, 1]), Ranks.own().group
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b"))
    for group in (later, own, mesh.get_group("a")):
        dist.all_reduce(torch.ones(()), group=group)
    together()
    say("ready", socket.gethostname())
    signal.pause()

import ctypes, socket
if __name__ == "__main__":
    if ctypes.CDLL(None).unshare(0x04000000 | (0 if os.getuid() == 0 else 0x10000000)):  # CLONE_NEWUTS, CLONE_NEWUSER
        print("ready to be skipped", flush=True)
        sys.exit(0)
    socket.sethostname({own_address()!r})
"""
    with start(tmp_path, body, world=2) as started:
        started.wait_for("ready")
        if "to be skipped" in started.printed[started.out].decode():
            pytest.skip("no namespace for another name of the host can be made here")
        while started.printed[started.out].count(b"ready") < 2:
            started._listen(time.monotonic() + 60)  # until the other rank is there too
        assert started.printed[started.out].decode() == f"ready {own_address()}\n" * 2
        found = listening([started.pid, *started.workers()])
    assert found <= {"127.0.0.1", "::ffff:127.0.0.1"}, found
    assert "127.0.0.1" in found


def test_joined_ranks_all_end_with_the_code_of_the_first_and_only_that_one_tells(tmp_path: Path) -> None:
    """Under torchrun or Slurm each process is one rank, the store in rank 0 of them or in their launcher."""
    body = """
    together()
    if place.rank == 1:
        raise DataError("train.jsonl:3", expected="text", got="none")
    together()
"""
    ended = join(tmp_path, body, 3)
    assert [code for code, _, _ in ended] == [3, 3, 3]
    assert [err.count("rank 1: train.jsonl:3: expected text, got none.") for _, _, err in ended] == [0, 1, 0]
    assert (tmp_path / "1" / "error.txt").exists()


def test_the_rank_that_hosts_the_store_outlives_those_that_have_not_heard_yet(tmp_path: Path) -> None:
    """Rank 1 is stopped while the others end: it takes the code of the fault, and blames nobody."""
    body = """
    class Wanted(UserError):
        exit_code = 16

    together()
    if place.rank == 1:
        import subprocess
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if place.rank == 2:
        time.sleep(0.5)
        raise Wanted("step 3", expected="a restart", got="none")
    time.sleep(60)
"""
    ended = join(tmp_path, body, 3)
    assert [code for code, _, _ in ended] == [16, 16, 16]
    assert [err for _, _, err in ended] == ["", "", "mimo: rank 2: step 3: expected a restart, got none.\n"]


def test_a_rank_that_fails_while_others_are_late_keeps_its_reason(tmp_path: Path) -> None:
    """What lies there from an earlier run is deleted by rank 0, once all have met; a late one deletes nothing."""
    reason = tmp_path / "error.txt"
    body = f"""
    together()

if os.environ["RANK"] == "1":
    import mimo.launch.start.worker

    def fail(place):
        raise ConfigError("run.seed", expected="luck", got="none")

    mimo.launch.start.worker._prepare = fail
if os.environ["RANK"] == "2":
    while not Path({str(reason)!r}).exists():
        time.sleep(0.01)
"""
    assert [code for code, *_ in join(tmp_path, body, 3, shared=True)] == [2, 2, 2]
    assert reason.read_text() == "rank 1: run.seed: expected luck, got none.\n"


def test_the_reason_of_an_earlier_run_is_deleted(tmp_path: Path) -> None:
    """By rank 0, once all have met."""
    (tmp_path / "error.txt").write_text("of the last run")
    assert not [code for code, *_ in join(tmp_path, "    together()\n", 2, shared=True) if code]
    assert not (tmp_path / "error.txt").exists()


def test_the_rank_that_hosts_the_store_waits_for_one_that_ends_later(tmp_path: Path) -> None:
    """Longer than where the run has failed, which is made short here."""
    body = """
    _fault._FINISHED_SECONDS = 0.1
    together()
    time.sleep(1.5 * place.rank)
"""
    assert join(tmp_path, body, 2) == [(0, "", "")] * 2


def test_sigterm_to_a_rank_that_is_done_is_nothing(tmp_path: Path) -> None:
    """Python forgets handlers of ours before the process is gone, but not that a signal is ignored."""
    body = """
    import atexit
    atexit.register(lambda: print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN))
"""
    assert join(tmp_path, body, 1, stops=True, fresh=True) == [(0, "True\n", "")]


def test_joined_ranks_that_succeed_end_with_0(tmp_path: Path) -> None:
    """Rank 0, in which the store lives, outlives the others."""
    body = """
    together()
"""
    assert join(tmp_path, body, 2) == [(0, "", "")] * 2
