"""Which process this is, on what it computes, and how the signal is called that ended another."""

from __future__ import annotations

import os

import pytest

from mimo.hooks import ConfigError
from mimo.trainer._fault import Fault
from mimo.trainer._launch import choose_device, launch
from mimo.trainer._place import Place, place_in, with_slurm
from mimo.trainer._worker import threads_for


def test_slurm_names_are_read_where_a_master_is_told() -> None:
    """A shell inside an allocation alone does not make a process a rank."""
    step = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    assert "RANK" not in with_slurm(step)
    assert place_in(with_slurm({**step, "MASTER_ADDR": "node"}), "cuda") == Place(
        rank=3, world=4, local_rank=1, device="cuda:1"
    )


def test_a_rank_that_is_no_number_is_refused() -> None:
    """The variable is named."""
    with pytest.raises(ConfigError, match="environment variable RANK: expected a whole number, got 'one'"):
        place_in({"RANK": "one", "WORLD_SIZE": "2"}, "cpu")


def test_a_port_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is opened."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(ConfigError, match="environment variable MASTER_PORT: expected a whole number, got 'a'"):
        launch(print, world=1)


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    """As those for real time are."""
    assert Fault.of_exit(2, -35).text == "rank 2 was ended by signal 35."


def test_cores_are_shared_by_the_ranks_of_a_machine_unless_the_user_says_otherwise() -> None:
    """Each rank gets at least one thread."""
    cores = len(os.sched_getaffinity(0))
    place = Place(rank=0, world=2 * cores, local_rank=0)
    assert threads_for(place, {}) == 1
    assert threads_for(Place(rank=0, world=1, local_rank=0), {}) == cores
    assert threads_for(place, {"OMP_NUM_THREADS": "3"}) is None


def test_cpu_is_always_there() -> None:
    """Asking for the CPU asks nothing of the machine."""
    assert choose_device("cpu", 4) == "cpu"


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU for each process of this machine; auto falls back to the CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_device("auto", 2) == "cuda"
    assert choose_device("auto", 3) == "cpu"
    with pytest.raises(ConfigError, match=r"run.device: expected 3 GPUs, one for each process.*, got 2 GPUs"):
        choose_device("cuda", 3)
