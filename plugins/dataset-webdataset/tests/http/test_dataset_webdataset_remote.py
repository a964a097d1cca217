"""Shards over HTTP on this machine: fetched once, kept within a bound, retried, and never waited for without end."""

from __future__ import annotations

import errno
import io
import itertools
import multiprocessing
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import pytest

from mimo.data import DATASETS, TOKENIZERS, RecordDataset, Tokenizer
from mimo.hooks import ConfigError, DataError, RunError, UserError, discover
from mimo_dataset_webdataset import WebdatasetConfig, _cache, index_shards
from mimo_dataset_webdataset._cache import ShardCache
from mimo_dataset_webdataset._known import Facts
from mimo_dataset_webdataset._plugin import open_webdataset
from mimo_dataset_webdataset._remote import Remote
from mimo_dataset_webdataset._shards import Shard

WITHOUT_WAITING = (0.0, 0.0, 0.0)


def tar(**members: bytes) -> bytes:
    """Return an archive of texts by key."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for key, content in members.items():
            info = tarfile.TarInfo(f"{key}.txt")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


SHARDS = {f"/s{number}.tar": tar(**{f"k{number}": f"shard {number}".encode()}) for number in range(3)}
SIZE = len(SHARDS["/s0.tar"])
Answer = Callable[[BaseHTTPRequestHandler, int], bool]


@attrs.define(eq=False)
class Server:
    """What a server has, what it does first, and what was wanted of it."""

    files: dict[str, bytes]
    url: str = ""
    tag: str = '"1"'
    first: Answer = lambda _handler, _attempt: False
    wanted: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    closing: threading.Event = attrs.field(factory=threading.Event)

    def shard(self, number: int = 0) -> Shard:
        """Return a shard of it."""
        return Shard(address=f"{self.url}/s{number}.tar", is_local=False)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server without ranges, as Python's own is."""
    state = Server(files=dict(SHARDS))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def _answer(self, *, with_content: bool) -> None:
            state.wanted[self.command, self.path] += 1
            if with_content and state.first(self, state.wanted[self.command, self.path]):
                self.close_connection = True
                return
            if self.path not in state.files:
                self.send_error(404)
                return
            content = state.files[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", state.tag)
            self.end_headers()
            if with_content:
                self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    state.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield state
    state.closing.set()
    http.shutdown()
    thread.join()
    http.server_close()


def tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes."""
    byte = discover(TOKENIZERS).find("byte", "here")
    built: Tokenizer = byte.build(byte.config(), [])
    return built


def config(server: Server, folder: Path, shards: str = "{0..2}", **settings: Any) -> WebdatasetConfig:
    """Return settings of its shards."""
    path = f"{server.url}/s{shards}.tar"
    return WebdatasetConfig(path=path, index=str(folder / "index"), cache=str(folder / "cache"), **settings)


def opened(config: WebdatasetConfig) -> RecordDataset:
    """Open the training samples."""
    dataset = open_webdataset(config, tokenizer(), "train")
    assert dataset is not None
    return dataset


def texts(dataset: RecordDataset) -> list[str]:
    """Return what the samples say."""
    return [tokenizer().decode(dataset.tokens(sample)) for sample in range(len(dataset))]


def cache(folder: Path, shards: float = 9, **remote: Any) -> ShardCache:
    """Return a cache with room for so many shards."""
    remote = {"timeout": 30.0, "waits": WITHOUT_WAITING, **remote}
    return ShardCache(folder=folder / "cache", bytes=int(shards * SIZE), remote=Remote(**remote))


def read(cache: ShardCache, shard: Shard, facts: Facts | None = None) -> bytes:
    """Return a shard's bytes."""
    with cache.opened(shard, facts or Facts(size=SIZE, mark='"1"')) as file:
        return file.read()


def test_dataset_webdataset_remote_shards_are_read_through_the_cache(server: Server, tmp_path: Path) -> None:
    """The index is made once, each shard is fetched once for all readers, and samples are those of the shards."""
    settings = config(server, tmp_path)
    assert index_shards(settings, "train") is not None
    dataset = opened(settings)
    assert texts(dataset) == texts(opened(settings)) == ["shard 0", "shard 1", "shard 2"]
    assert {path: server.wanted["GET", path] for path in SHARDS} == dict.fromkeys(SHARDS, 1)
    assert dataset.where(2) == "s2.tar:k2"
    assert dataset.origin().digest() == opened(settings).origin().digest()


def test_dataset_webdataset_remote_shards_need_an_index_and_folders(server: Server, tmp_path: Path) -> None:
    """Without an index, or a place for one or for shards, opening is refused with what to do; nothing is fetched."""
    with pytest.raises(ConfigError, match=r"data\.path: expected an index of shards .* Run mimo data index FILE"):
        opened(config(server, tmp_path))
    with pytest.raises(
        ConfigError, match=r"data\.index: expected a folder for what is known of shards that lie elsewhere"
    ):
        opened(WebdatasetConfig(path=f"{server.url}/s0.tar"))
    with pytest.raises(ConfigError, match=r"data\.cache: expected a folder for shards that lie elsewhere"):
        opened(WebdatasetConfig(path=f"{server.url}/s0.tar", index=str(tmp_path)))
    with pytest.raises(
        ConfigError, match=r"data\.path: expected an address that names its shards, .* in braces instead"
    ):
        opened(WebdatasetConfig(path=f"{server.url}/*.tar", index=str(tmp_path)))
    assert not server.wanted


def test_dataset_webdataset_remote_cache_keeps_what_was_used_last(server: Server, tmp_path: Path) -> None:
    """With room for two shards, the one that was not used for longest goes, and bytes stay within the bound."""
    kept = cache(tmp_path, 2.5)
    for number in (0, 1, 0, 2, 0, 1):
        assert read(kept, server.shard(number)) == SHARDS[f"/s{number}.tar"]
        assert sum(path.stat().st_size for path in kept.folder.glob("*.tar")) <= kept.bytes
    assert [server.wanted["GET", path] for path in SHARDS] == [1, 2, 1]


def test_dataset_webdataset_remote_cache_keeps_what_is_in_use(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that is being read stays though others were used since; where nothing else can go, one waits for room."""
    kept = cache(tmp_path, 2)
    facts = Facts(size=SIZE, mark='"1"')
    with kept.opened(server.shard(0), facts) as file:
        read(kept, server.shard(1))
        read(kept, server.shard(2))
        assert file.read() == SHARDS["/s0.tar"]
        read(kept, server.shard(0))
        assert server.wanted["GET", "/s0.tar"] == 1
        monkeypatch.setattr(_cache, "_LONGEST_WAIT", 0.0)
        with (
            kept.opened(server.shard(2), facts),
            pytest.raises(ConfigError, match=r"beside those that other processes use"),
        ):
            read(kept, server.shard(1))
    read(kept, server.shard(1))


def test_dataset_webdataset_remote_cache_removes_what_was_left_by_a_killed_process(
    server: Server, tmp_path: Path
) -> None:
    """A download that nobody finishes takes no room, and one that is too large for the cache is refused."""
    kept = cache(tmp_path, 1)
    kept.folder.mkdir()
    (kept.folder / "dead.partial").write_bytes(bytes(SIZE))
    assert read(kept, server.shard()) == SHARDS["/s0.tar"]
    assert not list(kept.folder.glob("*.partial"))
    with pytest.raises(ConfigError, match=r"data\.cache_bytes: expected room for a shard of 10,240 bytes, got 5,120"):
        read(cache(tmp_path / "small", 0.5), server.shard())


def test_dataset_webdataset_remote_cache_refuses_a_damaged_file(server: Server, tmp_path: Path) -> None:
    """A shard in the cache that has become shorter is refused by its path."""
    kept = cache(tmp_path)
    read(kept, server.shard())
    (path,) = kept.folder.glob("*.tar")
    path.write_bytes(b"")
    with pytest.raises(
        DataError, match=r"s0\.tar: expected all of the shard in .*, got another size\. Remove that file"
    ):
        read(kept, server.shard())


def failing(times: int) -> Answer:
    """Return what fails so many times."""

    def first(handler: BaseHTTPRequestHandler, attempt: int) -> bool:
        if attempt <= times:
            handler.send_error(503)
        return attempt <= times

    return first


def test_dataset_webdataset_remote_reads_are_retried(server: Server, tmp_path: Path) -> None:
    """A server that fails twice is read at the third attempt; one that always fails is refused by shard."""
    server.first = failing(2)
    assert read(cache(tmp_path), server.shard()) == SHARDS["/s0.tar"]
    assert server.wanted["GET", "/s0.tar"] == 3
    server.first = failing(99)
    with pytest.raises(
        RunError, match=r"http://127.*/s1\.tar: expected a shard that can be read, got .*503.*4 attempts"
    ):
        read(cache(tmp_path), server.shard(1))
    assert server.wanted["GET", "/s1.tar"] == 4
    assert len(list((tmp_path / "cache").glob("*.tar"))) == 1


@pytest.mark.parametrize("length", [SIZE - 512, SIZE, SIZE + 512])
def test_dataset_webdataset_remote_lengths_must_be_true(server: Server, tmp_path: Path, length: int) -> None:
    """An answer of another length than was announced, or that ends before its own, is never kept."""

    def first(handler: BaseHTTPRequestHandler, attempt: int) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        handler.wfile.write(bytes(SIZE - 1024 if length == SIZE else length))
        return True

    server.first = first
    with pytest.raises(RunError, match=r"s0\.tar: expected a shard that can be read, got .*4 attempts"):
        read(cache(tmp_path), server.shard())
    assert not list((tmp_path / "cache").glob("*.[tp]ar*"))


def test_dataset_webdataset_remote_servers_that_hang_are_given_up(server: Server, tmp_path: Path) -> None:
    """A server that takes a request and says nothing more ends by the timeout."""

    def first(handler: BaseHTTPRequestHandler, attempt: int) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(SIZE))
        handler.end_headers()
        handler.wfile.write(bytes(100))
        handler.wfile.flush()
        return server.closing.wait()

    server.first = first
    with pytest.raises(RunError, match=r"s0\.tar: expected a shard that can be read, got .*\(2 attempts\)"):
        read(cache(tmp_path, timeout=0.1, waits=(0.0,)), server.shard())


def test_dataset_webdataset_remote_servers_that_drip_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never stops sending a little ends by the time that a whole shard may take."""
    import fsspec

    with fsspec.open("memory://slow/s0.tar", "wb") as file:
        file.write(SHARDS["/s0.tar"])
    clock = itertools.count(0, 1000)
    monkeypatch.setattr("mimo_dataset_webdataset._remote.time.monotonic", lambda: next(clock))
    shard = Shard(address="memory://slow/s0.tar", is_local=False)
    with pytest.raises(RunError, match=r"slow/s0\.tar: expected a shard .*, got 10,240 of 10,240 bytes in 31 seconds"):
        Remote(timeout=30, waits=()).download(shard, SIZE, io.BytesIO())


def test_dataset_webdataset_remote_missing_and_changed_shards_are_refused(server: Server, tmp_path: Path) -> None:
    """A shard that isn't there, and one that is another than the index was made of, are refused by address."""
    settings = config(server, tmp_path)
    index_shards(settings, "train")
    server.tag = '"2"'
    with pytest.raises(
        DataError, match=r"/s0\.tar: expected the shard of which its index was made, .* with mark '\"2\"'"
    ):
        read(cache(tmp_path / "new"), server.shard())
    del server.files["/s1.tar"]
    with pytest.raises(DataError, match=r"/s1\.tar: expected a shard that can be read"):
        read(cache(tmp_path / "new"), server.shard(1))


READER = """
import sys, urllib.request
from mimo.data import TOKENIZERS
from mimo.hooks import discover
from mimo_dataset_webdataset._plugin import WebdatasetConfig, open_webdataset
url, index, cache = sys.argv[1:]
byte = discover(TOKENIZERS).find("byte", "here")
tokenizer = byte.build(byte.config(), [])
dataset = open_webdataset(WebdatasetConfig(path=url + "/s{0..2}.tar", index=index, cache=cache), tokenizer, "train")
urllib.request.urlopen(url + "/hello").read()
print([tokenizer.decode(dataset.tokens(sample)) for sample in range(3)])
"""


def test_dataset_webdataset_remote_two_processes_fetch_a_shard_once(server: Server, tmp_path: Path) -> None:
    """Of two processes that want the same shards at once, one fetches each and the other waits for it."""
    settings = config(server, tmp_path)
    index_shards(settings, "train")
    server.wanted.clear()
    server.files["/hello"] = b"hello"
    both = threading.Event()

    def first(handler: BaseHTTPRequestHandler, attempt: int) -> bool:
        if handler.path == "/hello" and attempt == 2:
            both.set()
        elif handler.path != "/hello":
            both.wait(60)
        return False

    server.first = first
    words = [sys.executable, "-c", READER, server.url, settings.index, str(tmp_path / "shared")]
    readers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]  # noqa: S603 - own text
    assert [reader.communicate(timeout=120)[0] for reader in readers] == ["['shard 0', 'shard 1', 'shard 2']\n"] * 2
    assert {path: server.wanted["GET", path] for path in SHARDS} == dict.fromkeys(SHARDS, 1)


def _read_all(settings: WebdatasetConfig, to: Connection) -> None:
    to.send(texts(opened(settings)))


def test_dataset_webdataset_remote_reading_works_after_a_fork(server: Server, tmp_path: Path) -> None:
    """A process that was forked after its parent fetched shards fetches others, without the parent's threads."""
    settings = config(server, tmp_path)
    index_shards(settings, "train")
    dataset = opened(settings)
    other = attrs.evolve(settings, cache=str(tmp_path / "other"))
    forks = multiprocessing.get_context("fork")
    here, there = forks.Pipe(duplex=False)
    child = forks.Process(target=_read_all, args=(other, there))
    child.start()
    assert here.poll(60)
    assert here.recv() == texts(dataset)
    child.join()


def test_dataset_webdataset_remote_secrets_in_addresses_are_not_shown(server: Server, tmp_path: Path) -> None:
    """Names, passwords and what follows a question mark stand in no message, name or index."""
    shard = Shard(address="https://me:secret@host/a/b.tar?token=secret", is_local=False)
    assert (shard.identity, shard.name) == ("https://host/a/b.tar", "b.tar")
    settings = attrs.evolve(config(server, tmp_path), path=f"{server.url}/s0.tar?token=secret")
    server.files["/s0.tar?token=secret"] = SHARDS["/s0.tar"]
    path = index_shards(settings, "train")
    assert path is not None
    assert "secret" not in str(path)
    assert b"secret" not in path.read_bytes()
    assert texts(opened(settings)) == ["shard 0"]


@pytest.mark.parametrize(
    "path",
    [
        "https://me:secret@host/a-*.tar?token=secret",
        "https://me:secret@host/a-{0..1.tar?token=secret",
        "https://me:secret@host/a-{5..1}.tar?token=secret",
        "file://me:secret@host/a.tar",
        "nobody://me:secret@host/a.tar?token=secret",
    ],
)
def test_dataset_webdataset_remote_secrets_are_in_no_refusal(path: str, tmp_path: Path) -> None:
    """Also where an address is refused before its shards are known."""
    settings = WebdatasetConfig(path=path, index=str(tmp_path / "i"), cache=str(tmp_path / "c"))
    with pytest.raises(ConfigError, match=r"data\.path: expected") as refused:
        index_shards(settings, "train")
    assert "secret" not in str(refused.value)
    assert "a" in str(refused.value)


@pytest.mark.parametrize(("status", "refused"), [(404, DataError), (403, DataError), (503, RunError), (429, RunError)])
def test_dataset_webdataset_remote_answers_show_no_secret(
    status: int, refused: type[UserError], server: Server
) -> None:
    """What is missing or forbidden is wrong with the data, a server that fails is not; neither shows the address."""

    def first(handler: BaseHTTPRequestHandler, attempt: int) -> bool:
        handler.send_error(status)
        return True

    server.first = first
    address = f"{server.url.replace('//', '//me:secret@')}/s0.tar?token=secret"
    with pytest.raises(refused, match="expected a shard that can be read") as error:
        Remote(timeout=30, waits=(0.0,)).facts(Shard(address=address, is_local=False))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("failures", [1, 99])
def test_dataset_webdataset_remote_a_cache_that_fails_to_be_written_breaks_no_item(
    failures: int, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails for a moment is tried again; one that keeps failing ends the run, as no item is at fault."""
    settings = config(server, tmp_path)
    index_shards(settings, "train")
    dataset = opened(attrs.evolve(settings, cache=str(tmp_path / "empty")))
    reserve, left = ShardCache._reserve, [failures]

    def failing(*args: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        reserve(*args)

    monkeypatch.setattr(ShardCache, "_reserve", failing)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    if failures == 1:
        assert texts(dataset) == [f"shard {number}" for number in range(3)]
    else:
        with pytest.raises(RunError, match=r"expected a file system that can be read, got .*Input/output error"):
            dataset.tokens(0)
    assert left[0] < failures


def test_dataset_webdataset_remote_a_full_disk_breaks_no_item(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a setting that is wrong, which ends the run, and no sample, which a run may leave out."""
    settings = config(server, tmp_path)
    index_shards(settings, "train")
    dataset = opened(attrs.evolve(settings, cache=str(tmp_path / "empty")))

    def failing(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ShardCache, "_reserve", failing)
    with pytest.raises(ConfigError, match=r"data\.cache: expected a folder that can be read .*No space"):
        dataset.tokens(0)


def test_dataset_webdataset_remote_other_file_systems_are_those_of_fsspec(tmp_path: Path) -> None:
    """Any protocol that fsspec knows is read likewise; one that nobody knows is refused by address."""
    import fsspec

    with fsspec.open("memory://bucket/s0.tar", "wb") as file:
        file.write(SHARDS["/s0.tar"])
    settings = WebdatasetConfig(path="memory://bucket/s{0,0}.tar", index=str(tmp_path / "i"), cache=str(tmp_path / "c"))
    index_shards(settings, "train")
    assert texts(opened(settings)) == ["shard 0", "shard 0"]
    unknown = attrs.evolve(settings, path="nobody://bucket/s0.tar")
    with pytest.raises(
        ConfigError, match=r"data\.path: expected an address whose protocol can be opened here, got 'nobody://"
    ):
        index_shards(unknown, "train")


def test_dataset_webdataset_remote_is_found_by_its_name() -> None:
    """The dataset that reads from elsewhere is the one that is registered."""
    assert discover(DATASETS).find("webdataset", "here").open is open_webdataset
