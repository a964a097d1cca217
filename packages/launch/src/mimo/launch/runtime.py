"""Starting the processes of a run, or joining those that torchrun or Slurm started; the watchdog, and faults."""

from mimo.launch.faults.collectives import recorded_collectives
from mimo.launch.faults.fault import Fault, FaultStore, OnFailure, is_consequence
from mimo.launch.faults.store import connect
from mimo.launch.faults.watchdog import Terms, Watchdog
from mimo.launch.start.device_identity import device_identity
from mimo.launch.start.launcher import check_open_files, launch, start_method
from mimo.launch.start.rendezvous import Rendezvous
from mimo.launch.start.world import join_alone, join_world

__all__ = [
    "Fault",
    "FaultStore",
    "OnFailure",
    "Rendezvous",
    "Terms",
    "Watchdog",
    "check_open_files",
    "connect",
    "device_identity",
    "is_consequence",
    "join_alone",
    "join_world",
    "launch",
    "recorded_collectives",
    "start_method",
]
