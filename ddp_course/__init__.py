"""Learn PyTorch's distributed data parallel training by building it, then by using the real thing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_course.launcher import RankError, RankPool, launch

__all__ = ["RankError", "RankPool", "launch"]


def __getattr__(name: str) -> Any:
    """Import torch when a name asks for it: `ddp-course --help` and an editor do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ddp_course.launcher"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
