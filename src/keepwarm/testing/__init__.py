"""Doubles for tests, ours and those of plug-in authors: a clock that stands still, an engine without a model."""

from keepwarm.testing.clock import ManualClock
from keepwarm.testing.memory import ArenaMemory
from keepwarm.testing.scripted import ScriptedExecutor, linear_step_time, next_by_position

__all__ = ["ArenaMemory", "ManualClock", "ScriptedExecutor", "linear_step_time", "next_by_position"]
