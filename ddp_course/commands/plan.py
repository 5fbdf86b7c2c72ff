"""How is a plan asked for from a terminal?

    ddp-course plan --params 7e9 --gpus 8 --gpu-memory 80GB
Read next: `beyond/plan.py`, which answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from ddp_course.beyond.memory import LOOPS, OPTIMIZERS, PRECISIONS
from ddp_course.beyond.plan import Plan, plan


def main(argv: list[str]) -> int:
    """Run `ddp-course plan`, and return its exit status."""
    asked = vars(parser().parse_args(argv))
    wants_json = asked.pop("json")
    try:
        answer = plan(**asked)
    except ValueError as error:
        print(f"ddp-course plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(answer), indent=1) if wants_json else answer)
    return 0 if answer.recommended else 1


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    made = argparse.ArgumentParser(
        prog="ddp-course plan",
        description="Say which strategy fits a transformer into the memory of your GPUs, and why.",
        epilog="Exit status: 0 something fits, 1 nothing does, 2 a figure makes no sense.",
    )
    made.add_argument("--params", help="parameters, as 7e9, 7B or 124M; the shape is guessed from them")
    made.add_argument("--gpus", type=int, default=1, help="GPUs in all (default 1)")
    made.add_argument("--gpu-memory", default="80GB", help="memory of one GPU, as 80GB or 40GiB (default 80GB)")
    made.add_argument("--nodes", type=int, default=1, help="machines the GPUs are in (default 1)")
    made.add_argument("--layers", type=int, help="blocks of the transformer")
    made.add_argument("--hidden", type=int, help="its width")
    made.add_argument("--vocabulary", type=int, default=50257, help="its tokens (default 50257)")
    made.add_argument("--sequence", type=int, default=1024, help="tokens in a row (default 1024)")
    made.add_argument("--local-batch", type=int, default=1, help="rows of one replica of the model (default 1)")
    kinds = "; ".join(f"{name}: {kind.says}" for name, kind in PRECISIONS.items())
    made.add_argument("--precision", default="autocast", help=f"{kinds} (default autocast)")
    made.add_argument("--optimizer", default="adamw", help=f"one of {', '.join(OPTIMIZERS)} (default adamw)")
    made.add_argument("--loop", default="foreach", help=f"how it goes over parameters: {', '.join(LOOPS)}")
    made.add_argument("--checkpointing", action="store_true", help="compute a block's activations again in backward")
    made.add_argument("--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view=True")
    made.add_argument("--json", action="store_true", help="print the answer as JSON, with all figures in bytes")
    return made


def as_json(answer: Plan) -> dict[str, Any]:
    question = {key: value for key, value in asdict(answer.question).items() if key != "given"}
    rows = [
        {
            "strategy": option.name,
            "fits": option.fits,
            "bytes": option.memory.parts() | {"sum": option.memory.total},
            "fullest_in": option.memory.moment,
            "sends_bytes": option.sends,
            "rows": option.rows,
            "bubble": option.bubble,
        }
        for option in answer.options
    ]
    best = answer.recommended.name if answer.recommended else None
    return {
        "question": question | {"usable_bytes": answer.question.usable},
        "options": rows,
        "recommended": best,
        "reasons": answer.reasons,
        "changes": answer.changes,
    }
