"""Processes of a run: the rank of this one, its device, its heartbeat; and the lock of the run directory."""

from mimo.launch.process.gpus import Device, Gpus, choose_device, count_gpus, find_gpus
from mimo.launch.process.heartbeat import Activity, Heartbeat, Status, group_timeout
from mimo.launch.process.process_info import (
    ProcessInfo,
    is_joining,
    local_world,
    process_from,
    ranks_of_machine,
    with_slurm,
)
from mimo.launch.process.run_lock import LOCK_FILE, RunLock, check_unlocked, take_lock, unwritable

__all__ = [
    "LOCK_FILE",
    "Activity",
    "Device",
    "Gpus",
    "Heartbeat",
    "ProcessInfo",
    "RunLock",
    "Status",
    "check_unlocked",
    "choose_device",
    "count_gpus",
    "find_gpus",
    "group_timeout",
    "is_joining",
    "local_world",
    "process_from",
    "ranks_of_machine",
    "take_lock",
    "unwritable",
    "with_slurm",
]
