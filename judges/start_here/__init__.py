"""The exercises of lesson 00: a first collective, a first comparison of replicas, a first data parallel step."""

from judges.start_here.replicas import REPLICAS
from judges.start_here.step import STEP
from judges.start_here.total import TOTAL

EXERCISES = (TOTAL, REPLICAS, STEP)

__all__ = ["EXERCISES", "REPLICAS", "STEP", "TOTAL"]
