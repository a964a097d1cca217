"""`mimo data index`: its file says what a run finds, survives being killed, and is refused where it is stale."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from commands import start
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from mimo.data import (
    Origin,
    PlacedMicrobatch,
    RecordDataset,
    SampleLayout,
    SampleSize,
    read_arrays,
    sizes_of,
    sizes_of_arrays,
)
from mimo.hooks import ConfigError, DataError
from mimo.trainer import Job, read_settings, resolve
from mimo.trainer.commands.main import run
from mimo.trainer.runtime import SampleCosts, StepData
from mimo_logger_pictures import Pictures

SETTINGS = """
[run]
name = "own"
steps = 1
global_batch = 2
[data]
plugin = "jsonl"
path = "{folder}/data/train.jsonl"
max_tokens = 60
[data.chat]
template = "chatml"
[tokenizer]
plugin = "word"
file = "{folder}/words.txt"
[modules.vision]
plugin = "vit"
ranks = [0]
config = {{ patch = 4, channels = 3, width = 16, layers = 1, heads = 2, intermediate = 16 }}
[modules.second]
plugin = "vit"
modality = "xray"
ranks = [0]
config = {{ patch = 8, channels = 3, width = 16, layers = 1, heads = 2, intermediate = 16 }}
[modules.language]
plugin = "decoder"
ranks = [0]
config = {{ hidden = 16, layers = 1, heads = 2, intermediate = 16 }}
"""
READING = "the template of conversations or settings by which samples are read"
USER = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Sure?"}]}
ANSWER = {"role": "assistant", "content": "Yes"}
SAMPLES: list[dict[str, Any]] = [
    {"text": "a b"},
    {"images": ["wide.png"], "text": "<image> a b", "weight": 0.25},
    {"images": ["wide.png", "tall.png", "wide.png"], "text": "<image> a <image> b <image> c d"},
    {"images": ["tall.png"], "items": {"xray": ["wide.png", "tall.png"]}, "text": "<xray> a <image> <xray>"},
    {"text": " ".join("abcd" * 40)},
    {"images": ["tall.png"] * 9, "text": "<image> a " * 9, "weight": 0},
    {"text": "d"},
]


def write(folder: Path, samples: Sequence[dict[str, Any] | str]) -> None:
    """Write samples to train on, some as they are."""
    lines = [sample if isinstance(sample, str) else json.dumps(sample) for sample in samples]
    (folder / "data" / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with settings and data in which everything is right; nothing is drawn, which takes a second."""
    monkeypatch.delattr(Pictures, "mimo_indexed")
    (tmp_path / "data").mkdir()
    Image.new("RGB", (21, 6)).save(tmp_path / "data" / "wide.png")
    Image.new("RGB", (9, 25)).save(tmp_path / "data" / "tall.png")
    write(tmp_path, [*SAMPLES, *SAMPLES])
    (tmp_path / "words.txt").write_text("a\nb\nc\nd\n")
    (tmp_path / "own.toml").write_text(SETTINGS.format(folder=tmp_path))
    return tmp_path


def index(folder: Path, *words: str, jobs: int = 1) -> int:
    """Return how the command ends."""
    return run(["data", "index", str(folder / "own.toml"), "--jobs", str(jobs), *words])


def use_bytes(folder: Path) -> None:
    """Have the tokenizer of bytes, which can take conversations."""
    text = (folder / "own.toml").read_text().replace('"word"', '"byte"').replace(f'file = "{folder}/words.txt"\n', "")
    (folder / "own.toml").write_text(text)


def opened(folder: Path, *overrides: str) -> Any:
    """Return the job."""
    return resolve(read_settings(folder / "own.toml", overrides))


def found(folder: Path) -> list[SampleSize]:
    """Return what the index holds."""
    sizes = sizes_of_arrays(read_arrays(folder / "data" / "train.jsonl.sizes"))
    return [sizes[sample] for sample in range(len(sizes))]


def test_data_index_says_what_is_laid_out(folder: Path) -> None:
    """Of each sample, for several encoders, weights, texts and items that are cut; also of any asked for at once."""
    job = opened(folder)
    layouts = [job.lay_out(job.train, sample) for sample in range(len(job.train))]
    infos = [tuple(job.train.infos(sample)) for sample in range(len(job.train))]
    assert sizes_of(job.train, [0]) is None
    assert index(folder) == 0
    sizes = found(folder)
    assert any(size.cut for size in sizes)
    assert {item.modality for size in sizes for item in size.items} == {"image", "xray"}
    assert {item.kept for size in sizes for item in size.items} == {True, False}
    for size, layout, own in zip(sizes, layouts, infos, strict=True):
        weights = layout.targets if layout.weights is None else layout.weights
        assert (size.tokens, size.cut) == (len(layout.tokens), layout.truncated)
        assert size.targets == np.count_nonzero(layout.targets)
        assert size.weight == pytest.approx(weights.sum())
        assert [(item.modality, item.number, item.size) for item in size.items] == [
            (info.modality, info.index, tuple(info.size)) for info in own
        ]
        kept = [(item.info.modality, item.info.index, item.rows) for item in layout.items]
        assert sorted((item.modality, item.number, item.rows) for item in size.items if item.kept) == sorted(kept)
    # A run takes sizes from it: no header is opened, and it comes to the same layouts.
    for picture in ("wide.png", "tall.png"):
        (folder / "data" / picture).unlink()
    job = opened(folder)
    for sample, layout in enumerate(layouts):
        again = job.lay_out(job.train, sample)
        assert np.array_equal(again.tokens, layout.tokens)
        assert again.items == layout.items
    taken = sizes_of(job.train, [5, 1])
    assert taken is not None
    assert [taken[0], taken[1]] == [sizes[5], sizes[1]]


def test_data_index_gives_the_sizes_by_which_samples_are_placed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same places as by their layouts, without making one."""
    lanes = ("run.global_batch=12", "run.micro_batch=2", "modules.vision.ranks=0-2", "modules.vision.dp=3")

    def placed() -> list[PlacedMicrobatch | None]:
        job = opened(folder, *lanes)
        samples = [12, 3, 1, 10, 5, 2, 0, 8, 9, 6, 13, 4]
        data = StepData.of_step(job, job.train, lambda: samples, costs=SampleCosts(job))
        return [microbatch.placed for microbatch in data.microbatches]

    before = placed()
    assert index(folder) == 0
    monkeypatch.setattr(Job, "lay_out_all", None)
    assert placed() == before
    assert None not in before


def test_data_index_lets_a_step_of_any_size_be_placed_by_cost(folder: Path) -> None:
    """Without one, that is by count, and who asks for cost is shown the command."""
    many = ("run.global_batch=131072", "run.micro_batch=131072")
    assert opened(folder, *many).balance == "count"
    with pytest.raises(
        ConfigError, match=r"data\.balance: .*'cost', data without an index.*\n?.*`mimo data index FILE`"
    ):
        opened(folder, *many, "data.balance=cost")
    assert index(folder, *many, "data.balance=cost") == 0
    assert opened(folder, *many).balance == opened(folder, *many, "data.balance=cost").balance == "cost"


def test_data_index_says_what_is_laid_out_of_conversations(folder: Path) -> None:
    """Which lose whole turns where they are too long, and of which only answers are learnt."""
    write(folder, [{"images": ["wide.png"] * n, "messages": [USER, ANSWER] * n} for n in (1, 2, 3)])
    use_bytes(folder)
    assert index(folder, "data.max_tokens=120") == 0
    job = opened(folder, "data.max_tokens=120")
    for sample, size in enumerate(found(folder)):
        layout = job.lay_out(job.train, sample)
        assert (size.tokens, size.targets) == (len(layout.tokens), int(np.count_nonzero(layout.targets)))
        assert (size.cut, [item.kept for item in size.items]) == (
            sample > 0,
            [number < 1 for number in range(sample + 1)],
        )


def laid_out(job: Any) -> list[SampleLayout]:
    """Return the layouts of all samples."""
    return [job.lay_out(job.train, sample) for sample in range(len(job.train))]


@pytest.mark.parametrize("chats", [False, True])
def test_data_index_keeps_ids(chats: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--tokens``, texts, weights and where to cut; a run then lays out what it did, and encodes nothing."""
    words: tuple[str, ...] = ()
    if chats:
        write(folder, [{"images": ["wide.png"] * n, "messages": [USER, ANSWER] * n} for n in (1, 2, 3)])
        use_bytes(folder)
        words = ("data.max_tokens=120",)
    job = opened(folder, *words)
    before, ends = laid_out(job), [job.train.ends(sample) for sample in range(len(job.train))]
    assert index(folder, "--tokens", *words) == 0
    for asked in ("tokens", "weights", "ends"):
        monkeypatch.setattr(RecordDataset, asked, None)
    job = opened(folder, *words)
    after = laid_out(job)
    kept = [job.train.ends(sample) for sample in range(len(job.train))]
    assert json.dumps(kept) == json.dumps(ends), "also as a record of a step has them"
    assert any(layout.truncated for layout in before)
    for one, other in zip(before, after, strict=True):
        for array in ("tokens", "labels", "weights"):
            assert np.array_equal(getattr(one, array), getattr(other, array)), array
        assert (one.items, one.truncated) == (other.items, other.truncated)


def test_data_index_keeps_ids_beside_broken_samples(folder: Path) -> None:
    """Which are left out as they are without."""
    write(folder, [SAMPLES[0], "{", SAMPLES[1]])
    assert index(folder) == 3
    before = laid_out(opened(folder, "data.broken=skip"))
    assert index(folder, "--tokens") == 3
    after = laid_out(opened(folder, "data.broken=skip"))
    assert [layout.tokens.tolist() for layout in after] == [layout.tokens.tolist() for layout in before]


def test_check_advises_to_keep_ids(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the time in which a rank reads a step's samples, and only where they aren't kept."""
    write(folder, [*SAMPLES, "{"])
    said = "each rank reads all 2 samples of a step, whose "
    advice = "`mimo data index FILE --tokens` keeps the ids"
    assert run(["check", str(folder / "own.toml")]) == 0
    out = capsys.readouterr().out
    assert f"{said}texts it encodes, in " in out
    assert advice in out
    assert index(folder, "--tokens") == 3
    assert run(["check", str(folder / "own.toml"), "data.broken=skip"]) == 0
    out = capsys.readouterr().out
    assert f"{said}ids are kept, in " in out
    assert advice not in out


def test_data_show_says_where_ids_come_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the text, or from those that the index keeps; a broken sample has none of its own."""
    write(folder, [*SAMPLES, "{"])
    for words, said in ((), "sizes"), (("--tokens",), "sizes and ids"):
        assert index(folder, *words) == 3
        capsys.readouterr()
        assert run(["data", "show", str(folder / "own.toml"), "data.broken=skip"]) == 0
        assert f"; {said} from the index\n" in capsys.readouterr().out
        assert run(["data", "show", str(folder / "own.toml"), "data.broken=skip", "--sample", str(len(SAMPLES))]) == 0
        assert "broken and left out; sizes from the index\n" in capsys.readouterr().out


def test_opening_looks_at_the_data_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sizes and ids together: a digest reads some MiB, on each rank."""
    assert index(folder, "--tokens") == 0
    origin, taken = RecordDataset.origin, list[str]()

    def counting(own: RecordDataset) -> Origin:
        found = origin(own)

        def digest() -> str:
            taken.append(found.name)
            return found.digest()

        return attrs.evolve(found, digest=digest)

    monkeypatch.setattr(RecordDataset, "origin", counting)
    opened(folder)
    assert taken == [f"{folder}/data/train.jsonl"]


def test_data_index_encodes_each_text_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ids are kept; processes that are forked note it in a file."""
    tokens, noted = RecordDataset._tokens_of, folder / "encoded"

    def noting(own: RecordDataset, record: Any) -> Any:
        with noted.open("a") as file:
            file.write("one\n")
        return tokens(own, record)

    monkeypatch.setattr(RecordDataset, "_tokens_of", noting)
    assert index(folder, "--tokens") == 0
    assert noted.read_text().count("one") == 2 * len(SAMPLES)


def test_data_index_keeps_ends_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever a dataset names, in any order, also such as it has not."""
    monkeypatch.setattr(RecordDataset, "ends", lambda _own, _sample: [40, 20, 40, 1000])
    before = laid_out(opened(folder))
    assert {len(layout.tokens) for layout in before if layout.truncated} >= {40}
    assert index(folder, "--tokens") == 0
    monkeypatch.undo()
    monkeypatch.delattr(Pictures, "mimo_indexed")
    after = laid_out(opened(folder))
    assert [layout.tokens.tolist() for layout in after] == [layout.tokens.tolist() for layout in before]


def test_data_index_takes_kept_ids_away_that_it_does_not_make(folder: Path) -> None:
    """They may be stale."""
    assert index(folder, "--tokens") == 0
    assert (folder / "data" / "train.jsonl.tokens").exists()
    assert index(folder) == 0
    assert not (folder / "data" / "train.jsonl.tokens").exists()


def test_data_index_refuses_kept_ids_that_are_stale_or_damaged(folder: Path) -> None:
    """By their file where opening shows it, and by the sample's place where reading does; the command keeps them."""
    again = r".* Run `mimo data index FILE --tokens`"
    path = folder / "data" / "train.jsonl.tokens"
    assert index(folder, "--tokens", "data.max_tokens=30") == 0
    old = path.read_bytes()
    assert index(folder, "--tokens") == 0
    new = path.read_bytes()
    path.write_bytes(old)
    with pytest.raises(DataError, match=rf"train\.jsonl\.tokens: .*before a change of data\.max_tokens{again}"):
        opened(folder)
    path.write_bytes(new)
    text = (folder / "own.toml").read_text()
    first, second = (text.index(f"[modules.{name}]") for name in ("vision", "second"))
    stop = text.index("[modules.language]")
    (folder / "own.toml").write_text(text[:first] + text[second:stop] + text[first:second] + text[stop:])
    with pytest.raises(DataError, match=rf"train\.jsonl\.tokens: .*before a change of the ids of placeholders{again}"):
        opened(folder)
    (folder / "own.toml").write_text(text)
    path.write_bytes(new[:-8])
    with pytest.raises(DataError, match=rf"train\.jsonl\.tokens: .*damaged file{again}"):
        opened(folder)
    stored = read_arrays(path.with_name(path.name)) if path.write_bytes(new) else None
    assert stored is not None
    place = new.index(stored.arrays["id"][:8].tobytes())
    path.write_bytes(new[:place] + b"\xff" + new[place + 1 :])
    job = opened(folder)
    with pytest.raises(DataError, match=rf"train\.jsonl:1: .*the ids of sample 0 differ from their checksum{again}"):
        job.lay_out(job.train, 0)
    job.lay_out(job.train, len(job.train) - 1)
    with pytest.raises(DataError, match=rf"train\.jsonl\.sizes: .*before a change of data\.max_tokens{again}"):
        opened(folder, "data.max_tokens=20")  # ids would go stale with them
    write(folder, [*SAMPLES, "{"])
    assert index(folder, "--tokens") == 3
    with pytest.raises(DataError, match=r"1 of 8 that are broken.* and run `mimo data index FILE --tokens` again"):
        opened(folder)


def test_data_index_is_the_same_whatever_becomes_of_longer_samples(folder: Path) -> None:
    """One that is too long for a run isn't broken: other settings may cut it."""
    assert index(folder, "data.longer=refuse") == 0
    sizes = found(folder)
    assert index(folder) == 0
    assert found(folder) == sizes
    assert any(one.cut for one in sizes)
    assert not any(one.broken for one in sizes)


def test_data_index_is_the_same_from_any_number_of_processes(folder: Path) -> None:
    """Bit for bit, with all that is broken in the same order; nothing else is left beside the data."""
    texts = [{"text": "a b"}] * 4000  # some blocks of samples
    write(folder, [*SAMPLES, "{", *texts, *SAMPLES, {"images": ["none.png"], "text": "<image>"}, *texts, *SAMPLES])
    files = ("train.jsonl.sizes", "train.jsonl.broken")
    made = []
    for jobs in (1, 3):
        assert index(folder, jobs=jobs) == 3
        made.append([(folder / "data" / name).read_bytes() for name in files])
        names = {each.name for each in (folder / "data").iterdir()}
        assert names == {"train.jsonl", "train.jsonl.lines", *files, "wide.png", "tall.png"}
    assert made[0] == made[1]


def test_data_index_resumes_when_it_was_killed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it had read is not read again, and the file is that of a command that nothing disturbed."""
    write(folder, [SAMPLES[0], SAMPLES[-1]] * 8000)
    undisturbed = folder / "undisturbed"
    shutil.copytree(folder / "data", undisturbed / "data")
    assert index(folder, f"data.path={undisturbed}/data/train.jsonl") == 0
    partial = folder / "data" / "train.jsonl.sizes.partial"
    with start("data", "index", folder / "own.toml", "--jobs", "1") as started:
        while not list(partial.glob("*.block")):
            assert started.process.is_alive()
            time.sleep(0.01)
        started.process.kill()
        started.process.join()
        assert started.process.exitcode == -signal.SIGKILL
        assert not (folder / "data" / "train.jsonl.sizes").exists()
        capsys.readouterr()
        while (code := index(folder)) == 2:  # the process that read for it ends its block first
            assert "no other `mimo data index`" in capsys.readouterr().err
            time.sleep(0.01)
    assert code == 0
    assert "blocks were there from an earlier command)" in capsys.readouterr().out
    names = ("train.jsonl.sizes", "train.jsonl.lines")
    for name in names:
        assert (folder / "data" / name).read_bytes() == (undisturbed / "data" / name).read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("data.max_tokens=30",), ()),
        (("modules.second.config.patch=4",), ()),
        (("data.chat.system=Be kind",), ()),
        ((), ("--decode",)),
        (("--tokens",), ()),
    ],
)
def test_data_index_takes_no_blocks_that_were_made_otherwise(
    before: tuple[str, ...], after: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that ended early with other settings leaves some, of which the next one uses none."""
    write(folder, [*SAMPLES, {"images": ["half.png"], "text": "<image>"}])
    (folder / "data" / "half.png").write_bytes((folder / "data" / "wide.png").read_bytes()[:45])
    path = folder / "data" / "train.jsonl.sizes"
    code = index(folder, *after)
    expected = path.read_bytes()
    path.unlink()
    path.mkdir()  # so that blocks are there, and don't become an index
    assert index(folder, *before) == 2
    assert list(path.with_name("train.jsonl.sizes.partial").glob("*.block"))
    path.rmdir()
    capsys.readouterr()
    assert index(folder, *after) == code
    assert "from an earlier command" not in capsys.readouterr().out
    assert path.read_bytes() == expected


def _words(folder: Path) -> None:
    (folder / "words.txt").write_text("a\nb\nc\nd\ne\n")


def _data(folder: Path) -> None:
    path = folder / "data" / "train.jsonl"
    path.write_text(path.read_text().replace('"a b"', '"b a"', 1))
    (folder / "data" / "train.jsonl.lines").unlink()


def _no_change(_folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "override", "named"),
    [
        (_data, (), "the data"),
        pytest.param(_words, (), "the tokenizer", marks=pytest.mark.soak),
        pytest.param(_no_change, ("data.chat.system=Be kind",), READING, marks=pytest.mark.soak),
        (_no_change, ("data.chat.template=gemma",), READING),
        (_no_change, ("modules.second.config.patch=4",), "the encoders"),
        pytest.param(_no_change, ("data.max_tokens=61",), "data.max_tokens", marks=pytest.mark.soak),
        (_words, ("data.max_tokens=61",), "the tokenizer, data.max_tokens"),
    ],
)
def test_data_index_that_is_stale_is_refused(
    change: Callable[[Path], None], override: tuple[str, ...], named: str, folder: Path
) -> None:
    """With what has changed and the command; made again, it holds."""
    assert index(folder) == 0
    opened(folder, "modules.second.config.layers=2", "run.global_batch=4")  # these change no rows
    change(folder)
    with pytest.raises(DataError) as refused:
        opened(folder, *override)
    assert f"got one from before a change of {named}. Run `mimo data index`" in str(refused.value)
    assert index(folder, *override) == 0
    opened(folder, *override)


def test_data_index_is_stale_when_the_template_beside_the_tokenizer_has_changed(folder: Path) -> None:
    """Which a run takes where it names no other one."""
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate("abcd")}))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens(["</s>", "<image>", "<xray>"])
    backend.save(f"{folder}/tokenizer.json")
    template = folder / "chat_template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    words = (f'tokenizer={{plugin="file",path="{folder}/tokenizer.json"}}', "data.chat.template=own")
    assert index(folder, *words) == 0
    opened(folder, *words)
    template.write_text(template.read_text() + "a")
    with pytest.raises(DataError, match=rf"got one from before a change of {READING}\. Run `mimo data index`"):
        opened(folder, *words)
    assert index(folder, *words) == 0
    opened(folder, *words)


@pytest.mark.parametrize("bytes_", [0, 5, 200, -1])
def test_data_index_that_is_damaged_is_refused(bytes_: int, folder: Path) -> None:
    """As where it was not copied whole."""
    assert index(folder) == 0
    path = folder / "data" / "train.jsonl.sizes"
    path.write_bytes(path.read_bytes()[:bytes_])
    with pytest.raises(DataError, match=r"train\.jsonl\.sizes: expected an index of samples, got a damaged file"):
        opened(folder)


def test_data_index_with_another_number_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bit anywhere in its arrays, so that no size is believed that nobody found; the command makes it anew."""
    assert index(folder) == 0
    path = folder / "data" / "train.jsonl.sizes"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert run(["check", str(folder / "own.toml")]) == 3
    message = capsys.readouterr().err
    assert "train.jsonl.sizes: expected an index of samples, got a damaged file: its checksum is" in message
    assert "Run `mimo data index` with these settings" in message
    assert index(folder) == 0
    assert path.read_bytes() == whole


BROKEN: list[tuple[dict[str, Any] | str, str]] = [
    ("{", "text that is not JSON"),
    ({"txt": "a"}, "only the keys"),
    ({"text": "e"}, "text that the tokenizer can encode"),
    ({"images": ["none.png"], "text": "<image>"}, "'none.png': there is no such file"),
    ({"images": ["words.png"], "text": "<image>"}, "'words.png': it is no image"),
    ({"images": ["../words.txt"], "text": "<image>"}, "which leaves it"),
    ({"images": ["wide.png"], "text": "a"}, "one placeholder <image>"),
    ({"items": {"sonar": ["wide.png"]}, "text": "a"}, "an item of modality 'sonar'"),
    ({"text": "a", "weight": -1}, "a number from 0"),
]


def test_data_index_collects_all_that_is_broken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By file and line with the reason, in a file and printed; a run refuses it, or keeps places at weight 0."""
    (folder / "data" / "words.png").write_text("no picture")
    write(folder, [SAMPLES[0], *(sample for sample, _ in BROKEN), SAMPLES[1]])
    assert index(folder) == 3
    out, err = capsys.readouterr()
    listed = [json.loads(line) for line in (folder / "data" / "train.jsonl.broken").read_text().splitlines()]
    assert [each["sample"] for each in listed] == list(range(1, len(BROKEN) + 1))
    for number, (each, (_, reason)) in enumerate(zip(listed, BROKEN, strict=True), start=2):
        assert each["where"].endswith(f"train.jsonl:{number}")
        assert reason in each["reason"]
    assert f"{len(BROKEN)} broken samples" in out
    assert "text that is not JSON" in out
    assert f"got {len(BROKEN)} of {len(BROKEN) + 2} that are broken" in err
    with pytest.raises(DataError, match=rf"got {len(BROKEN)} of 11 that are broken, such as .*train.jsonl:2"):
        opened(folder)
    job = opened(folder, "data.broken=skip")
    assert len(job.train) == len(BROKEN) + 2
    for sample, size in enumerate(found(folder)):
        layout = job.lay_out(job.train, sample)
        assert size.tokens == len(layout.tokens)
        assert size.broken == (0 < sample <= len(BROKEN))
        assert bool(layout.targets.any()) is not size.broken
    capsys.readouterr()
    assert run(["data", "show", str(folder / "own.toml"), "data.broken=skip", "--sample", "1"]) == 0
    assert "0 items in 0 rows, broken and left out; sizes from the index" in capsys.readouterr().out
    write(folder, [SAMPLES[0], SAMPLES[1]])
    assert index(folder) == 0
    assert not (folder / "data" / "train.jsonl.broken").exists()


def test_data_index_can_decode_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pixels that are damaged behind a sound header are found then alone, item by item."""
    whole = (folder / "data" / "wide.png").read_bytes()
    (folder / "data" / "half.png").write_bytes(whole[:45])
    write(folder, [SAMPLES[1], {"images": ["half.png", "wide.png", "half.png"], "text": "<image> <image> <image>"}])
    assert index(folder) == 0
    assert index(folder, "--decode") == 3
    listed = [json.loads(line) for line in (folder / "data" / "train.jsonl.broken").read_text().splitlines()]
    assert [(each["sample"], each["item"]) for each in listed] == [(1, "image 0"), (1, "image 2")]
    assert all("half.png" in each["reason"] for each in listed)


def test_data_index_is_written_where_it_can_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else it is refused with the setting that helps; a folder of its own serves runs with the same setting."""
    (folder / "file").write_text("")
    assert index(folder, f"data.index={folder}/file/index") == 2
    assert "Set data.index to a folder of yours" in capsys.readouterr().err
    assert index(folder, f"data.index={folder}/index") == 0
    assert not list((folder / "data").glob("train.jsonl.*"))
    assert sizes_of(opened(folder, f"data.index={folder}/index").train, [0]) is not None
    assert sizes_of(opened(folder).train, [0]) is None


def test_data_index_reports_what_is_in_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts, percentiles and histograms, as a picture too; `mimo check` then prints the counts."""
    monkeypatch.undo()  # what is installed draws
    assert index(folder) == 0
    out = capsys.readouterr().out
    sizes = found(folder)
    tokens, targets = sum(size.tokens for size in sizes), sum(size.targets for size in sizes)
    weight = sum(size.weight for size in sizes)
    pictures = [item for size in sizes for item in size.items if item.modality == "image"]
    assert f"tokens   {tokens:,}, {targets:,} learnt, of weight {weight:,.6g}" in out
    rows, cut = (sum(item.rows for item in pictures if item.kept), sum(not item.kept for item in pictures))
    assert f"image    {len(pictures)} items, {rows:,} rows, {cut} items cut off" in out
    ordered = sorted(size.tokens for size in sizes)
    (line,) = (line.split() for line in out.splitlines() if line.startswith("tokens of a sample  "))
    assert (line[4], line[7], line[-1]) == (str(ordered[0]), str(ordered[6]), str(ordered[-1]))
    assert "█" in out
    with Image.open(folder / "data" / "train.jsonl.sizes.png") as picture:
        assert picture.height > picture.width * 0.8  # three panels: tokens, images, x-rays
    assert run(["check", str(folder / "own.toml")]) == 0
    counts = f"index      {tokens:,} tokens, {targets:,} learnt, {len(pictures)} image items, "
    assert counts in capsys.readouterr().out


def test_data_index_refuses_data_without_a_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of samples that are drawn; and numbers of processes that are none."""
    text = (folder / "own.toml").read_text()
    begin, end = text.index("[data]"), text.index("[tokenizer]")
    (folder / "own.toml").write_text(f'{text[:begin]}[data]\nplugin = "mock"\n{text[end:]}')
    assert index(folder) == 2
    message = "data.plugin: expected a dataset that says where its samples come from, got 'mock'"
    assert message in capsys.readouterr().err
    assert index(folder, jobs=-1) == 2
    assert "--jobs: expected 0 or more, got -1" in capsys.readouterr().err


def test_data_index_ends_with_what_ended_a_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that is wrong for all samples is no broken sample."""
    write(folder, [{"messages": [ANSWER]}])
    use_bytes(folder)
    assert index(folder, "data.chat.template=own") == 2
    assert "data.chat.template: expected the name of a template" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        opened(folder, "data.chat.template=own").train.tokens(0)
