"""The torch half: boundaries that move rows between any two placements, and the executor of a plan."""

from mimo.schedule.runtime._boundary import Boundary, Pending
from mimo.schedule.runtime._channel import Channel, open_channels
from mimo.schedule.runtime._executor import Executor
from mimo.schedule.runtime._measured import measured
from mimo.schedule.runtime._program import LOSS, StageProgram
from mimo.schedule.runtime._progress import Progress
from mimo.schedule.runtime._record import Moment, Record

__all__ = [
    "LOSS",
    "Boundary",
    "Channel",
    "Executor",
    "Moment",
    "Pending",
    "Progress",
    "Record",
    "StageProgram",
    "measured",
    "open_channels",
]
