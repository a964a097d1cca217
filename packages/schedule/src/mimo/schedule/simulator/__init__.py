"""When each rank would do what, for a plan and costs."""

from mimo.schedule.simulator.simulation import Simulation
from mimo.schedule.simulator.simulator import simulate

__all__ = ["Simulation", "simulate"]
