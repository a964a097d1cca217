"""What a machine refuses to real ranks: threads and memory."""

from __future__ import annotations

from pathlib import Path

from launching import launched


def test_a_rank_that_can_start_no_thread_says_why_at_once(tmp_path: Path) -> None:
    """Though a thread is what writes its reason to the run directory."""
    body = """
    together()
    if process.rank == 1:
        def refuse(thread):
            raise RuntimeError("can't start new thread")
        threading.Thread.start = refuse
        threading.Thread().start()
    together()
"""
    code, _, err = launched(tmp_path, body)
    assert code == 3
    limits = "ulimit -u and -v, pids.max of its control group, host memory"
    expected = f"rank 1 can't start another thread or process (see {limits})"
    assert err.splitlines()[-1] == f"{expected}: RuntimeError: can't start new thread"
    assert expected in (tmp_path / "error.txt").read_text()


def test_a_rank_that_cannot_be_watched_ends_all(tmp_path: Path) -> None:
    """The first thread of a rank is the one that watches."""
    body = """
    together()

def refuse(watch):
    if watch._process.rank == 1:
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
    if process.rank == 1:
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
    expected = "mimo: rank 1 was ended by signal 6 (SIGABRT). It is out of host memory: it had 10"
    assert err.splitlines()[-1].startswith(expected), err
