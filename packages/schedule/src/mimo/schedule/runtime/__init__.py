"""The torch half: boundaries that move rows between any two placements, and the executor of a plan."""

from mimo.schedule.runtime.boundary import Boundary, Pending
from mimo.schedule.runtime.channel import Channel, open_channels
from mimo.schedule.runtime.executor import Executor
from mimo.schedule.runtime.measurement import measured
from mimo.schedule.runtime.program import LOSS, StageProgram
from mimo.schedule.runtime.progress import Progress
from mimo.schedule.runtime.record import Moment, Record
from mimo.schedule.runtime.timer import DeviceTimer, HostTimer, Timer, timer_of

__all__ = [
    "LOSS",
    "Boundary",
    "Channel",
    "DeviceTimer",
    "Executor",
    "HostTimer",
    "Moment",
    "Pending",
    "Progress",
    "Record",
    "StageProgram",
    "Timer",
    "measured",
    "open_channels",
    "timer_of",
]
