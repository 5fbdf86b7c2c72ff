"""How does my function come to run on N ranks, and what do I see when one of them fails or hangs?

Read it in this order: `spawn.py` (one call), `pool.py` (ranks that stay), `settings.py` (what can be set),
`running_call.py` (a call under way), `processes.py` and `worker.py` (both ends of a rank), `interception.py` and
`recorder.py` (what a rank was asked to send), `wait_graph.py` (who keeps whom waiting), `hang_report.py` and
`failure_report.py` (what a failure says), `watchdog.py` (the same under torchrun), `magic.py` (whole cells).
"""

from ddp_course.launcher.failure_report import RankError
from ddp_course.launcher.pool import RankPool
from ddp_course.launcher.spawn import launch

__all__ = ["RankError", "RankPool", "launch"]
