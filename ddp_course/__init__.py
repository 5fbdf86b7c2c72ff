"""Learn PyTorch's distributed data parallel training by building it, then by using the real thing."""

from ddp_course.launcher import RankError, RankPool, launch
from ddp_course.launcher.extension import load_ipython_extension

__all__ = ["RankError", "RankPool", "launch", "load_ipython_extension"]
