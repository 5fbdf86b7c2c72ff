"""How does a test wait for what another process does? It looks again and again, until that comes or cannot come."""

import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], object], alive: Callable[[], bool], what: str, limit_s: float = 120.0, every_s: float = 0.02
) -> None:
    """Return once `condition` holds; fail if who is to bring it about has ended, or after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert alive() and time.monotonic() < deadline, what
        time.sleep(every_s)
