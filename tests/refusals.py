"""What does a call say that is refused? For tests, and for functions that they run on ranks."""

from __future__ import annotations

import re
from collections.abc import Callable


def message_of(call: Callable[[], object]) -> str:
    """The kind of error and its sentence, with runs of spaces as one; "no error" if there is none."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {re.sub(r' +', ' ', str(error))}"
    return "no error"
