"""Generation from text, pictures and clips: with the decode cache as without, over tensor ranks as on one."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers
from cases import Modules, some
from commands import here
from jobs import CPU, find, make_job
from PIL import Image
from published import llama_config
from tables import Table, table
from test_hf_families import NEMOTRON
from test_hf_folders import config_file
from test_oracle import SP, on
from test_oracle_audio import SMALL
from test_oracle_mamba import CONFIG as HYBRID

from mimo.hooks import ConfigError, Kind
from mimo.model import LANGUAGE_MODELS
from mimo.model.runtime import SupportsDecodeCache
from mimo.testing import Pool
from mimo.trainer import (
    Prompt,
    Sampling,
    Trainer,
    generate,
    generate_many,
    open_checkpoint,
    prompt_of,
    read_settings,
    resolve,
)

TEXT = "w1 <image> w3 w4 <image> w5"
TOKENS = 24
DRAWN = Sampling(temperature=1.5, top_p=0.95, seed=4)
GPT_OSS: Mapping[str, Any] = {
    "vocab_size": 300,
    "eos_token_id": 256,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
LANGUAGES: Mapping[str, Mapping[str, Any]] = {
    "decoder": {"mrope_section": (1, 1, 0)},
    "window": {"sliding_window": 6, "query_key_norm": True, "tied": True},
    "experts": {"experts": 4, "experts_per_token": 2, "shared_intermediate": 11},
    "hybrid": HYBRID,
}
"""What the language model's config has beside the sizes of `tables.table`, where three ranks have two heads to read."""


def settings_for(name: str, tp: int = 1, pp: int = 1, ep: int = 1) -> Table:
    """Return the settings of a model of `LANGUAGES` that sees, as `mimo generate` lays it out; with ``ep`` lanes."""
    first = tp * ep
    modules = {"vision": on(0, first - 1), "language": on(0, first * pp - 1, tp=tp, pp=pp, ep=ep)}
    settings = table(modules, seed=12)
    language = settings["modules"]["language"]
    if name == "hybrid":
        language |= {"plugin": name, "config": LANGUAGES[name]}
    else:
        language["config"] |= LANGUAGES[name]
    settings["run"] |= {"global_batch": ep, "micro_batch": 1}
    return settings


def pictures_of(job: Any) -> list[Any]:
    """Return two pictures of the data."""
    return [job.train.raw(sample, 0) for sample in range(24) if job.train.infos(sample)][:2]


def prompts_of(job: Any) -> list[Prompt]:
    """Return prompts of several lengths, with two pictures, one or none."""
    pictures = pictures_of(job)
    given = {TEXT: pictures, "w7": [], "w1 <image>": pictures[:1], "w2 w3 w5": [], "": pictures, "w9 w8": []}
    return [prompt_of(job, text, {"image": own} if own else {}) for text, own in given.items()]


def write_many(rank: int, settings: Table, batches: tuple[int, ...], use_cache: bool = True) -> list[list[str]]:  # noqa: FBT002 - ranks get arguments by position
    """Return what a model writes after several prompts, greedily and drawn, so many at once; 0: each by itself."""
    job = make_job(settings)
    trainer, prompts = Trainer(job, rank=rank, device=CPU), prompts_of(job)
    written = []
    for batch in batches:
        for sampling in (Sampling(), attrs.evolve(DRAWN, temperature=3.0)):
            keys: Any = {"max_tokens": TOKENS, "sampling": sampling, "use_cache": use_cache}
            if not batch:
                written.append([generate(trainer, prompt, **keys) for prompt in prompts])
                continue
            answers = generate_many(trainer, prompts, batch=batch, **keys)
            assert [answer.number for answer in answers] == list(range(len(prompts)))
            for answer in answers:
                assert (answer.ended == "max_tokens") == (answer.tokens == TOKENS)
                assert len(answer.text.split()) == answer.tokens
            written.append([answer.text for answer in answers])
    return written


def write(rank: int, settings: Table, *, strange: bool = False, use_cache: bool = True) -> list[str]:
    """Return what a model writes after pictures and text, greedily and drawn, by pieces."""
    job = make_job(settings)
    pictures = pictures_of(job)
    if strange:
        job = forgetful(settings)
    trainer, prompt = Trainer(job, rank=rank, device=CPU), prompt_of(job, TEXT, {"image": pictures})
    written = []
    for sampling in (Sampling(), DRAWN):
        pieces: list[str] = []
        written.append(
            generate(trainer, prompt, max_tokens=TOKENS, sampling=sampling, on_text=pieces.append, use_cache=use_cache)
        )
        assert "".join(pieces) == written[-1]
        assert len(pieces) == len(written[-1].split())  # each comes by itself
    return written


def forgetful(settings: Table) -> Any:
    """Return the job where the language model is one that can't remember."""

    def find_forgetful(kind: Kind[Any], name: str, where: str) -> Any:
        found = find(kind, name, where)
        return found if kind is not LANGUAGE_MODELS else attrs.evolve(found, build=lambda *given: hide(found, *given))

    def hide(spec: Any, *given: Any) -> Any:
        module = spec.build(*given)
        module.__class__ = type("Forgetful", (type(module),), {"new_decode_cache": None})
        assert not isinstance(module, SupportsDecodeCache)
        return module

    return resolve(read_settings(settings), find=find_forgetful)


@pytest.mark.parametrize("name", some(LANGUAGES, {"window", "hybrid"}))
def test_what_is_remembered_changes_no_token(name: str, pool: Pool) -> None:
    """Of the likeliest and of drawn ones, text and rows of pictures in the prompt; nor who can't remember."""
    settings = settings_for(name)
    (found,) = pool.recall(1, write, settings)
    assert all(len(text.split()) > 4 for text in found), found
    assert pool.run(1, write_again, settings) == [[found, found] if name == "decoder" else [found]]


def write_again(rank: int, settings: Table) -> list[list[str]]:
    """Return what is written where the whole text is read for each token, and by a third-party model that must."""
    strange = [write(rank, settings, strange=True)] if "mrope_section" in str(settings) else []
    return [write(rank, settings, use_cache=False), *strange]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "tp"),
    some([("decoder", 2), ("window", 3), ("experts", 2), ("hybrid", 2), ("hybrid", 3)], {("window", 3), ("hybrid", 2)}),
)
def test_tensor_ranks_write_what_one_does(name: str, tp: int, pool: Pool) -> None:
    """Every one of them, key-value heads and groups fewer than they included; a vocabulary that they don't divide."""
    (alone,) = pool.recall(1, write, settings_for(name))
    assert pool.run(tp, write, settings_for(name, tp)) == [alone] * tp


@pytest.mark.parametrize("name", some(LANGUAGES, {"decoder", "hybrid"}))
def test_prompts_are_continued_at_once_as_each_by_itself(name: str, pool: Pool) -> None:
    """With pictures or without, however many at once: what ends makes room for the next, and draws stay the same."""
    ((alone, drawn, *together),) = pool.recall(1, write_many, settings_for(name), (0, 2, 6))
    assert together[::2] == [alone] * 2
    assert drawn[0] == together[1][0]  # the first of a file draws as a prompt by itself
    assert together[1::2] == [together[1]] * 2
    assert len({len(text.split()) for text in together[1]}) > 1  # not all end at once
    if name == "decoder":
        assert pool.run(1, write_many, settings_for(name), (3,), False) == [together[:2]]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "tp"), some([("decoder", 2), ("hybrid", 3)], {("hybrid", 3)}))
def test_tensor_ranks_continue_several_prompts_as_one_does(name: str, tp: int, pool: Pool) -> None:
    """Each of them, with the same draws."""
    ((_, _, *together),) = pool.recall(1, write_many, settings_for(name), (0, 2, 6))
    assert pool.run(tp, write_many, settings_for(name, tp), (3,)) == [together[:2]] * tp


PIPELINES = [
    ("decoder", 1, 2, 1),
    ("window", 1, 2, 1),
    ("hybrid", 1, 3, 1),
    ("decoder", 2, 2, 1),
    ("experts", 1, 2, 2),
]
"""Names of `LANGUAGES`, tp, pp, ep."""


@pytest.mark.parametrize(("name", "tp", "pp", "ep"), some(PIPELINES, {("experts", 1, 2, 2)}))
def test_stages_write_what_one_process_does(name: str, tp: int, pp: int, ep: int, pool: Pool) -> None:
    """Every rank of each, one prompt or several at once, likeliest tokens and drawn ones, tied embeddings too."""
    settings = settings_for(name, tp, pp, ep)
    (alone,) = pool.recall(1, write, settings_for(name))
    assert pool.run(tp * pp * ep, write, settings) == [alone] * (tp * pp * ep)
    ((_, _, *together),) = pool.recall(1, write_many, settings_for(name), (0, 2, 6))
    assert pool.run(tp * pp * ep, write_many, settings, (3,)) == [together[:2]] * (tp * pp * ep)


def test_parameters_over_lanes_are_gathered_for_it(pool: Pool) -> None:
    """Those of an encoder, whose lanes all encode all items."""
    settings = settings_for("decoder", 2)
    settings["optimizer"] |= {"plugin": "distributed", "shard": "full"}
    (alone,) = pool.recall(1, write, settings_for("decoder"))
    assert pool.run(2, write, settings) == [alone] * 2


def run_long(_rank: int) -> None:
    """Write further than samples may be long."""
    settings = settings_for("decoder")
    settings["data"]["max_tokens"] = 6
    job = make_job(settings)
    found = generate(Trainer(job, rank=0, device=CPU), prompt_of(job, "w1 w2 w3 w4 w5"), max_tokens=12, sampling=DRAWN)
    assert len(found.split()) == 12


def test_what_is_written_may_be_longer_than_samples(pool: Pool) -> None:
    """Only the prompt must not."""
    pool.run(1, run_long)


def run_mixed(_rank: int) -> None:
    """Write on from a picture and a clip, in either order, and refuse what does not fit."""
    settings = table({"vision": on(0, 0), "audio": on(0, 0), "language": on(0, 0)})
    settings["modules"]["audio"] = {"plugin": "whisper", "config": SMALL, **on(0, 0)}
    job = make_job(settings)
    trainer = Trainer(job, rank=0, device=CPU)
    picture = Image.linear_gradient("L").resize((6, 8))
    clip = (np.sin(np.arange(1600, dtype=np.float32)), 16_000)
    items: dict[str, list[Any]] = {"image": [picture], "audio": [clip]}
    texts = ["<image> w1 <audio>", "<audio> w1 <image>"]
    prompts = [prompt_of(job, text, items) for text in texts]
    drawn = [attrs.evolve(DRAWN, seed=seed) for seed in range(4)]
    found = [[generate(trainer, prompt, max_tokens=9, sampling=each) for each in drawn] for prompt in prompts]
    assert found[0] != found[1]
    assert generate(trainer, prompt_of(job, "", items), max_tokens=9)
    for text, printed in {
        "w1 <image>": r"the prompt: expected one <audio> in the text for each item of --audio, got 0 for 1 item",
        "<image> <image> <audio>": r"the prompt: expected one <image> in the text for each item .* got 2 for 1 item",
    }.items():
        with pytest.raises(ConfigError, match=printed):
            generate(trainer, prompt_of(job, text, items), max_tokens=9)
    with pytest.raises(ConfigError, match=r"--audio: expected what encoder 'whisper' can read, got .*: a waveform"):
        prompt_of(job, "<audio>", {"audio": [(np.full(3, np.nan)[:0], 16_000)]})
    with pytest.raises(
        ConfigError, match=r"--item film=FILE: expected a model .* This one takes --image and --audio\."
    ):
        prompt_of(job, "<film>", {"film": [picture]})
    broken = prompt_of(job, "<audio>", {"audio": [(np.full(900, np.nan, dtype=np.float32), 16_000)]})
    with pytest.raises(ConfigError, match=r"--audio: expected what .*: the mean of its channels at frame 0 is nan"):
        generate(trainer, broken, max_tokens=9)


def test_pictures_and_clips_stand_in_any_order(pool: Pool) -> None:
    """Each at its placeholder; too few or too many, and what no encoder reads, are refused in words."""
    pool.run(1, run_mixed)


def run_elsewhere(rank: int, modules: Modules) -> str:
    """Return why a trainer that is laid out otherwise does not write."""
    job = make_job(table(modules, microbatches=2))
    with pytest.raises(ConfigError) as caught:
        generate(Trainer(job, rank=rank, device=CPU), prompt_of(job, "w1"), max_tokens=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ({"language": on(0, 1, cp=2)}, r"modules.language: expected a module on each .* got ranks [0, 1] with pp = 1"),
        (
            {"vision": on(1, 1), "language": on(0, 1, pp=2)},
            r"modules.vision: expected a module on rank 0 of the language .* got ranks [1] with pp = 1, cp = 1",
        ),
        ({"language": on(0, 1, tp=2, **SP)}, "sequence_parallel = true. Load the checkpoint in another layout."),
    ],
    ids=["cp", "encoder", "sp"],
)
def test_other_layouts_are_refused(modules: Modules, text: str, pool: Pool) -> None:
    """Instead of waiting for ranks that do not take part."""
    for printed in pool.run(2, run_elsewhere, modules):
        assert all(part in printed for part in text.split(" .* ")), printed


HEAD = '[run]\nname = "x"\nsteps = 1\nglobal_batch = 1\n[data]\nplugin = "jsonl"\npath = "none.jsonl"\n'
ASKED = ("to be", "or not to be, that is", "?")


def write_checkpoint(rank: int, folder: str, tp: int, pp: int) -> tuple[list[str], str]:
    """Return what a checkpoint generates greedily after texts, two at a time, and without the cache after the first."""
    trainer = open_checkpoint(Path(folder), rank=rank, tp=tp, pp=pp)
    answers = generate_many(trainer, ASKED, max_tokens=TOKENS, batch=2)
    return [answer.text for answer in answers], generate(trainer, ASKED[0], max_tokens=TOKENS, use_cache=False)


@pytest.mark.parametrize(
    ("family", "plugin"),
    some(
        [("llama", "decoder"), ("nemotron_h", "hybrid"), ("llama", "hf-decoder"), ("gpt_oss", "hf-decoder")],
        {("nemotron_h", "hybrid")},
    ),
)
def test_published_weights_write_what_transformers_does(family: str, plugin: str, tmp_path: Path, pool: Pool) -> None:
    """The same likeliest tokens after the same texts, with its own cache; from one process and from two.

    What would learn to predict further tokens need not be among the weights.
    """
    config: Any = llama_config(vocab_size=300, eos_token_id=256)
    if family == "nemotron_h":
        keys = {**NEMOTRON, "vocab_size": 300, "eos_token_id": 256}
        config = transformers.AutoConfig.for_model(family, **copy.deepcopy(keys))
    elif family == "gpt_oss":  # every other layer has a window
        config = transformers.AutoConfig.for_model(family, **GPT_OSS)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    model.save_pretrained(there := tmp_path / "there")
    choice = ("--plugin", plugin) if family == "llama" else ()
    printed = here("checkpoint", "import-hf", f"language={there}", *choice).printed
    tables = tomllib.loads(printed)["modules"]
    assert tables["language"]["plugin"] == plugin
    if plugin == "hf-decoder":
        (settings := tmp_path / "run.toml").write_text(
            HEAD + printed.replace('"hf-decoder"', '"hf-decoder"\nranks = "0"')
        )
    else:
        tables["language"]["config"]["next_tokens"] = int(plugin == "decoder")
        settings = config_file(tmp_path, tables)
    words = ("--config", settings, "--out", tmp_path / "run")
    assert not here("checkpoint", "import-hf", f"language={there}", *words).err
    expected = [written_by(model, text) for text in ASKED]
    assert len(set(expected)) == len(set(ASKED))
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        found = pool.run(tp * pp, write_checkpoint, str(tmp_path / "run"), tp, pp)
        assert found == [(expected, expected[0])] * (tp * pp)


def written_by(model: Any, text: str) -> str:
    """Return what a model of the library writes after a text, greedily, of ids that are bytes."""
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
            suppress_tokens=list(range(257, 300)),
        )
    written = [token for token in found[0, ids.shape[1] :].tolist() if token != 256]
    assert len(set(written)) > 2, written
    return bytes(written).decode("utf-8", errors="replace")
