"""What was read lately: bounded by bytes, made once for threads that need it at once, and safe after a fork."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Event

import pytest

from mimo.data import BoundedCache, ChatSettings, Origin, Record, RecordDataset, read_record
from mimo.data.sources import record_dataset
from mimo.data.text import byte_tokenizer


def test_data_bounded_cache_forgets_the_least_recently_used() -> None:
    """Values are made again once others have taken their bytes, and one that is larger than the bound each time."""
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    cache = BoundedCache[str](6, len)
    for name in ("aa", "bb", "cc", "aa", "dd", "aa", "cc", "bb", "1234567", "1234567", "bb"):
        assert cache.get(name, partial(make, name)) == name
    assert made == ["aa", "bb", "cc", "dd", "bb", "1234567", "1234567"]


def test_data_bounded_cache_makes_a_value_once_for_many_threads() -> None:
    """Threads that need the same value at once wait for one of them; others are not held up."""
    cache = BoundedCache[int](100, lambda value: 1)
    began, go = Event(), Event()
    made: list[int] = []

    def slow() -> int:
        began.set()
        assert go.wait(60)
        made.append(1)
        return 7

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(cache.get, "slow", slow) for _ in range(3)]
        assert began.wait(60)
        assert pool.submit(cache.get, "quick", lambda: 3).result(60) == 3
        go.set()
        assert [each.result(60) for each in waiting] == [7] * 3
    assert made == [1]


def test_data_bounded_cache_passes_errors_on() -> None:
    """What fails is tried again."""
    cache = BoundedCache[int](100, lambda value: 1)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: 1 // 0)
    assert cache.get("a", lambda: 5) == 5


def test_data_bounded_cache_serves_a_process_forked_while_it_was_locked() -> None:
    """A thread that makes a value as the process is forked doesn't lock the child out."""
    cache = BoundedCache[int](100, lambda value: 1)
    begin, go = Barrier(2), Event()

    def slow() -> int:
        begin.wait(60)
        assert go.wait(60)
        return 1

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.get, "a", slow)
        begin.wait(60)
        child = os.fork()
        if not child:
            os._exit(cache.get("a", lambda: 42))
        _, status = os.waitpid(child, 0)
        go.set()
        assert waiting.result(60) == 1
    assert os.waitstatus_to_exitcode(status) == 42


def test_data_records_are_kept_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset remembers records read lately, but not more bytes of items than are allowed."""
    monkeypatch.setattr(record_dataset, "_CACHED_BYTES", 50_000)
    reads: list[int] = []

    class Sounds:
        shards = ()

        def __len__(self) -> int:
            return 9

        def where(self, sample: int) -> str:
            return f"sounds:{sample}"

        def read(self, sample: int) -> Record:
            reads.append(sample)
            return read_record({"text": "a", "audio": [bytes(20_000 if sample < 5 else 10)]}, self.where(sample))

        def origin(self) -> Origin:
            raise NotImplementedError

        def item(self, sample: int, reference: str) -> Path:
            raise NotImplementedError

    tokenizer = byte_tokenizer.build(byte_tokenizer.ByteConfig(), ["audio"])
    dataset = RecordDataset(Sounds(), tokenizer, ChatSettings())
    for sample in (0, 1, 0, 2, 0, 1, 5, 6, 7, 8, 5):
        assert dataset.infos(sample)[0].modality == "audio"
        assert dataset.raw(sample, 0) == bytes(20_000 if sample < 5 else 10)
    assert reads == [0, 1, 2, 1, 5, 6, 7, 8]
