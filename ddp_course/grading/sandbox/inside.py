"""What happens in the box: the learner's function runs on ranks, and what came of it is written down as data.

`serve` is called in the kernel that has run the learner's cells, once for each round of a check. The request comes from
the judge, who is trusted; the reply goes to him as a text that he reads as data and no more. A learner may replace
everything in this kernel, this function too. What that gains is a reply of the learner's making, which is judged.

Read next: `outside.py`, where the judge is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle

from ddp_course.grading.answer.isolated import Answer, NotJudged
from ddp_course.grading.exercise import AnswerFailed, Exercise, Fault
from ddp_course.grading.sandbox import protocol


def serve(asked: str, told: str, cells: dict[str, Any]) -> None:
    """Do what the file `asked` asks for, with the functions among `cells`, and write the file `told`."""
    request = cloudpickle.loads(Path(asked).read_bytes())
    Path(told).write_text(protocol.written(_reply(cells=cells, **request)))


def _reply(
    cells: dict[str, Any],
    exercise: dict[str, Any],
    limit_s: float,
    driver: Any,
    world_size: int,
    args: tuple,
    settings: dict[str, bool],
) -> dict[str, Any]:
    known = Exercise(title="", minutes=0, checks=(), judge=None, **exercise)
    if known.function not in cells:
        return {"fault": Fault(report=f"there is no {known.function}; its cell did not run"), "printed": []}
    printed: list[str] = []
    try:
        answer = Answer(cells[known.function], known, limit_s)
        printed = answer.printed
        return {"results": answer.run(driver, world_size, *args, **settings), "printed": printed}
    except AnswerFailed as failed:
        return {"fault": failed.fault, "printed": printed}
    except NotJudged as error:
        return {"not_judged": str(error), "printed": printed}
    except protocol.NotPlain as error:
        return {"fault": Fault("plain values", str(error)), "printed": printed}
