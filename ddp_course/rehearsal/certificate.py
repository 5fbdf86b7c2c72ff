"""What has a rehearsal measured of this program, in a form that CI keeps?

A property that was not measured is None, with the reason; it never counts as right.
Read next: `certify.py`, which measures; `pytest_plugin.py`, which asks for it in a test. No torch is needed here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

ROUNDING = 1e-6  # relative, of single precision


@dataclass(frozen=True)
class Certificate:
    """What was measured of one program with these arguments, on one process and on several ranks.

    Attributes:
        weights: `equal`, `equal_to`, `largest_difference` (of a weight, relative to the largest weight), `steps`.
        samples: `once`; of all epochs together `rows`, `repeated` and `missing`; `epochs`.
        resume: `equal`, and the `largest_difference` of saved numbers; None if something differs not by rounding.
        findings: what `ddp-course rehearse` says, each as in its JSON.
        failure: why the program did not run to its end; "" if it did.
    """

    script: str
    sha256: str
    arguments: list[str]
    torch: str
    ranks: int
    weights: dict
    samples: dict
    resume: dict
    findings: list[dict]
    failure: str

    @property
    def equal_to(self) -> float | None:
        """The largest difference, rounded up to a power of ten; 0 if there is none; None if weights aren't equal."""
        return self.weights["equal_to"]

    @property
    def steps(self) -> int:
        """How many optimizer steps were compared with those of one process."""
        return self.weights["steps"]

    @property
    def samples_once(self) -> bool | None:
        """Whether the ranks together trained on each sample once in each epoch; None: not seen."""
        return self.samples["once"]

    @property
    def resumed_equal(self) -> bool | None:
        """Whether a run that was killed and resumed has saved the same bits as one that was not; None: not seen."""
        return self.resume["equal"]

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    def line(self) -> str:
        """Return what was measured in one line."""
        return "; ".join([self._weights(), self._resume(), self._samples(), *self._wrong()])

    def check(self, equal_to: float | None = None, samples_once: bool = False, resumed_equal: bool = False) -> None:
        """Fail if something is wrong, or was measured and differs by more than rounding, or is asked for and not so.

        Args:
            equal_to: the largest difference of weights that is allowed.
        Raises:
            AssertionError: names what differs, and what is wrong on which line.
        """
        __tracebackhide__ = True  # pytest shows the caller's line
        far = equal_to is not None and (self.equal_to is None or self.weights["largest_difference"] > equal_to)
        rounded = 0 < (self.resume["largest_difference"] or 0) < ROUNDING
        unlike = {
            self._weights(): far or self.weights["equal"] is False,
            # Rounding is told, and fails only where bits are asked for: 4 ranks of `programs/ddp.py` resume to 2e-8.
            self._resume(): resumed_equal and not self.resumed_equal or self.resumed_equal is False and not rounded,
            self._samples(): samples_once and not self.samples_once,  # padding repeats some, and is no fault
        }
        failed = [words for words, fails in unlike.items() if fails] + self._wrong()
        if failed:
            raise AssertionError("\n    ".join([f"{self.script}, certified on {self.ranks} ranks:", *failed]))

    def _weights(self) -> str:
        seen = self.weights
        if seen["equal"]:
            near = f"to {_power(seen['equal_to'])}" if seen["equal_to"] else "exactly"
            return f"{self.ranks} ranks equal 1 process {near} over {seen['steps']} steps"
        differ = "differ from" if seen["equal"] is False else "not compared with"
        return f"{self.ranks} ranks {differ} 1 process: {seen['reason']}"

    def _resume(self) -> str:
        said = {True: "resumed run bit-equal", False: "resumed run differs", None: "resumed run not compared"}
        return ": ".join(filter(None, (said[self.resume["equal"]], self.resume["reason"])))

    def _samples(self) -> str:
        seen = self.samples
        if seen["once"] is None:
            return f"samples not counted: {seen['reason']}"
        told = f"{seen['repeated']} of {seen['rows']} repeated, {seen['missing']} missing"
        return "samples each once" if seen["once"] else f"samples: {told}, in {seen['epochs']} epochs"

    def _wrong(self) -> list[str]:
        wrong = [each for each in self.findings if each["grade"] == "wrong"]
        told = [f"wrong: {each['fault']}, line {each['line']}: {each['evidence'] or each['means']}" for each in wrong]
        return told + ([f"failed: {self.failure.splitlines()[0]}"] if self.failure else [])


def power_of_ten(number: float) -> float:
    """Return the smallest power of ten that is not below a positive number."""
    exponent = -320
    while float(f"1e{exponent}") < number:
        exponent += 1
    return float(f"1e{exponent}")


def _power(number: float) -> str:
    return f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")
