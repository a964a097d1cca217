"""An item that would make a step's loss infinite is named by file, line and place before anything computes with it."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import numpy as np
import pytest
import soundfile
import torch
from commands import write_lines
from jobs import make_job
from tables import table
from test_oracle import on
from test_oracle_audio import CONFIGS as WHISPER

from mimo.hooks import ConfigError, DataError
from mimo.model import EncoderSpec
from mimo.trainer import Job, prompt_of
from mimo.trainer.runtime import Microbatch, prepared_item


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A model that hears, with four samples, the third of which has a clip with one sample far above full scale."""
    tone = np.sin(np.arange(900) / 9).astype(np.float32)
    soundfile.write(tmp_path / "good.wav", tone, 16_000, subtype="FLOAT")
    tone[700] = 1e30
    soundfile.write(tmp_path / "loud.wav", tone, 16_000, subtype="FLOAT")
    clips = ["good", "good", "loud", "good"]
    write_lines(tmp_path / "train.jsonl", [{"audio": [f"{name}.wav"], "text": "<audio> w1"} for name in clips])
    modules = {
        "audio": {**on(0, 0), "plugin": "whisper", "config": WHISPER["clips alone"]},
        "language": on(0, 0),
    }
    settings = table(modules)
    settings["run"] |= {"global_batch": 4, "micro_batch": 4}
    settings["data"] = {"plugin": "jsonl", "path": str(tmp_path / "train.jsonl")}
    return make_job(settings)


def test_a_clip_far_above_full_scale_is_named_at_first_use(job: Job, tmp_path: Path) -> None:
    """With the line of the sample, the file, and the frame; the mel spectrum of it would be infinite."""
    assert job.train is not None
    with pytest.raises(DataError) as caught:
        Microbatch(job, job.train, (0, 1, 2, 3)).prepare(job.module("audio"), 0)
    assert str(caught.value).startswith(
        f"{tmp_path}/train.jsonl:3: expected an item that the whisper encoder can read, got audio 0 of size "
        f"(900, 16000): '{tmp_path}/loud.wav': the mean of its channels at frame 700 is 1e+30, "
    )
    assert len(Microbatch(job, job.train, (0, 1, 3)).prepare(job.module("audio"), 0)) == 3


def test_what_an_encoder_makes_of_an_item_must_be_finite(job: Job, tmp_path: Path) -> None:
    """Of any encoder, a third-party one that looks at nothing too: for training, evaluation and generation."""
    module = job.module("audio")
    assert isinstance(module.spec, EncoderSpec)
    spec = attrs.evolve(
        module.spec, prepare=lambda _config, _raw: {"mel": torch.tensor([[1.0, 2.0], [3.0, torch.inf]])}
    )
    careless = attrs.evolve(module, spec=spec)
    said = r"prepared, its 'mel' holds inf at [1, 1], and a step of it has no finite loss."
    assert job.train is not None
    with pytest.raises(DataError, match=rf"train\.jsonl:2: .* {re.escape(said)}"):
        Microbatch(job, job.train, (1,)).prepare(careless, 0)
    prompt = prompt_of(job, "", {"audio": [tmp_path / "good.wav"]})
    with pytest.raises(ConfigError, match=rf"^--audio: .* {re.escape(said)}"):
        prepared_item(careless, prompt, prompt.infos(0)[0])
