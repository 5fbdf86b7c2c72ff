"""How does my function come to run on N ranks, and what do I see when one of them fails or hangs?

Read it in this order: `spawn.py` (one call), `pool.py` (ranks that stay), `settings.py` (what can be set),
`running_call.py` (a call under way), `processes.py` and `worker.py` (both ends of a rank), `interception.py` and
`recorder.py` (what a rank was asked to send), `wait_graph.py` (who keeps whom waiting), `hang_report.py` and
`failure_report.py` (what a failure says).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddp_course.launcher.failure_report import RankError

if TYPE_CHECKING:
    from ddp_course.launcher.pool import RankPool
    from ddp_course.launcher.spawn import launch

__all__ = ["RankError", "RankPool", "launch"]


def __getattr__(name: str) -> Any:
    """Import torch when a name asks for it: who reads a report of ranks starts none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'pool' if name == 'RankPool' else 'spawn'}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
