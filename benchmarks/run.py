"""Run the benchmarks: a table on the terminal, and JSON beside it.

    make bench                                              everything
    .venv/bin/python benchmarks/run.py --quick              a first impression
    .venv/bin/python benchmarks/run.py --only launch/rank_pool_call --ranks 2

Times are no pass or fail: the exit code is 0 unless something could not be run. `measure.py` documents the JSON.

A new benchmark is a file here with `measure(plan: Plan) -> Result`, and one line in `BENCHMARKS`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # this file's folder stood there, and its launch.py would be found as `launch`

BENCHMARKS = {
    "launch": "benchmarks.launch",  # from the call to the result, for each way to run a function on ranks
    "sampler": "benchmarks.sampler",  # first index, memory and speed of a shuffled epoch beside torch's
    "ddp": "benchmarks.ddp",  # a step of the course's replicas beside torch's DistributedDataParallel
    "simulation": "benchmarks.simulation",  # predicted and measured steps over the simulated link; overlap
}
LASTS = ("all four take under an hour; --quick takes about ten minutes", "all four take about ten minutes")


def main(arguments: list[str] | None = None) -> int:
    # Here, not at the top: a spawned rank imports this file again, and must not pay for it.
    from benchmarks import measure

    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and engines are ended
    started = datetime.now(UTC)
    machine = measure.machine_state()
    print(measure.show_machine(machine), flush=True)
    results = {}
    names = list(dict.fromkeys(item.partition("/")[0] for item in options.only or BENCHMARKS))
    measure.show_progress(f"{', '.join(names)}: on two idle cores, {LASTS[options.quick]}")
    for name in names:
        keys = frozenset(
            key for item in options.only for bench, _, key in [item.partition("/")] if bench == name and key
        )
        plan = measure.Plan(options.quick, keys, tuple(options.ranks or ((2,) if options.quick else (2, 4))))
        began = time.monotonic()
        results[name] = importlib.import_module(BENCHMARKS[name]).measure(plan)
        measure.show_progress(f"{name}: took {(time.monotonic() - began) / 60:.1f} minutes")
        print("\n" + measure.table(results[name]), flush=True)
    path = options.json or ROOT / "out" / "bench" / f"{started:%Y-%m-%dT%H-%M-%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = measure.as_json(results, machine, started.isoformat(timespec="seconds"), options.quick)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nwritten: {path}")
    failures = [failure for result in results.values() for failure in result.failures]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions, on 2 ranks unless --ranks says more")
    parser.add_argument("--ranks", type=numbers, metavar="N,N", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME[/ROW],...",
                        help="benchmarks, or rows of one, by their names in the JSON")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write (default: out/bench/<time>.json)")
    options = parser.parse_args(arguments)
    for item in options.only:
        if item.partition("/")[0] not in BENCHMARKS:
            parser.error(f"--only {item}: there is no such benchmark; choose from {', '.join(BENCHMARKS)}")
    return options


def numbers(text: str) -> list[int]:
    """Read "2,4"."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


if __name__ == "__main__":
    sys.exit(main())
