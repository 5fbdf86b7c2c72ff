"""What happens while a call is under way on the ranks?

The parent waits for all answers. A call fails in one of three ways: a rank raises, dies, or hangs. On the first
sign of it the parent asks every rank where it is, gives them a moment to answer, and turns what it knows into
one `RankError`. No collective is used for this: the ranks may be stuck in one.

Left out on purpose: what becomes of the ranks afterwards, which `pool.py` decides.
Read next: `pool.py`.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from multiprocessing import connection
from typing import Any

from ddp_course.launcher import failure_report, guard, hang_report, packing, wait_graph
from ddp_course.launcher.failure import Failure, describe
from ddp_course.launcher.lines import Line, line_in_dump
from ddp_course.launcher.processes import END_LIMIT_S, RankProcess
from ddp_course.launcher.rank_status import Whereabouts
from ddp_course.launcher.relay import Relay
from ddp_course.launcher.wrapped import NOT_IN_IT

IMPORT_LIMIT_S = 900.0  # for torch to be imported: on a busy machine that takes minutes
SETTLE_S = 0.3  # after the first failure: time for the others to fail or finish too
ANSWER_S = 1.0  # time for a rank to say where it is
ASK_EVERY_S = 1.0  # in a long call: torch's own time limit does not guard every group (a new_group has 30 minutes)
SHOW_EVERY_S = 0.1


class Call:
    """One call: the answers so far, and what is known of each rank."""

    def __init__(self, number: int, ranks: list[RankProcess], relay: Relay):
        self.number, self.ranks, self.relay = number, ranks, relay
        self.starting = number == 0
        self.imported: dict[int, Any] = {}  # ranks whose own code runs by now
        self.answers: dict[int, tuple[bytes, Whereabouts]] = {}
        self.failures: dict[int, Failure] = {}  # in the order of arrival
        self.dead: dict[int, int] = {}  # rank -> exit code, in the order of death
        self.where: dict[int, Whereabouts] = {}

    def collect(self, limit_s: float | None, timeout_s: float) -> list[Any]:
        """Wait for every rank's answer and return them by rank; show what ranks print meanwhile.

        Raises:
            RankError: a rank raised, died or hung.
        """
        start = asked = time.monotonic()
        deadline = start + (float("inf") if limit_s is None else limit_s)
        while len(self.answers) < len(self.ranks):
            self.listen(min(SHOW_EVERY_S, max(0.0, deadline - time.monotonic())))
            self.relay.show(set(self.answers))
            now = time.monotonic()
            if self.failures or self.dead:
                raise self.explain(timeout_s)
            if self.starting and len(self.imported) < len(self.ranks):  # no limit of ours starts before that
                deadline = now + limit_s
                if now - start > IMPORT_LIMIT_S:
                    raise failure_report.still_importing(IMPORT_LIMIT_S, self.whereabouts(), self.imported.keys())
            if now > deadline:
                ranks = self.whereabouts()
                if any(w.status in ("running", "silent") for w in ranks):
                    raise failure_report.over_limit(limit_s, ranks, self.starting)
                continue  # the last answers came while we asked
            if now - start > timeout_s and not self.starting:
                if now - asked > ASK_EVERY_S:
                    asked = now
                    self.ask()
                known = [self.one(rank) for rank in self.ranks] if self.settled(now - asked) else []
                if wait_graph.longest_s(known) > timeout_s + SETTLE_S:
                    raise self.explain(timeout_s)
        told = [self.answers[rank.rank][1] for rank in self.ranks]
        if wait_graph.find_uneven(told) or any(w.oddities for w in told):
            self.ask_after_the_end()
        return [self.unpacked(rank.rank, deadline) for rank in self.ranks]

    def ask_after_the_end(self) -> None:
        """All ranks have returned, and yet something was wrong: say what.

        Raises:
            RankError: calls were left over, or did nothing.
        """
        ranks = self.whereabouts()
        if made := wait_graph.find_uneven(ranks):
            raise hang_report.uneven(made, ranks)
        if outside := [w for w in ranks if any(NOT_IN_IT in words for words, _ in w.oddities)]:
            raise hang_report.without_effect(outside[0], ranks)

    def unpacked(self, rank: int, deadline: float) -> Any:
        """Rebuild a rank's result, which runs the result's own code: it may raise anything, or take its time."""
        try:
            return packing.unpack(self.answers[rank][0], deadline)
        except TimeoutError:
            text = f"the result of rank {rank} came in time, but rebuilding it from its bytes took longer than limit_s"
            raise failure_report.RankError("result", rank, text, self.whereabouts()) from None
        except Exception as error:
            failure = describe(error, rank, during="result")
            text = f"the result of rank {rank} came, but could not be rebuilt from its bytes: {failure.story}"
            raise failure_report.RankError("result", rank, text, self.whereabouts(), failure) from None

    def listen(self, wait_s: float) -> None:
        """Take in every message, and then every death, that comes within `wait_s`."""
        alive = [rank for rank in self.ranks if rank.rank not in self.dead]
        ready = connection.wait([x for rank in alive for x in (rank.pipe, rank.process.sentinel)], wait_s)
        for rank in alive:
            if rank.pipe in ready:
                self.hear(rank)
            elif rank.process.sentinel in ready:  # and nothing left to hear
                self.note_death(rank)

    def hear(self, rank: RankProcess) -> None:
        try:
            number, word, content = rank.pipe.recv()
        except (EOFError, OSError):
            return self.note_death(rank)
        if number != self.number:
            return  # a late answer to a question of the call before
        books = {"imported": self.imported, "where": self.where, "raised": self.failures}
        books.get(word, self.answers)[rank.rank] = content
        if word != "where" and self.where.pop(rank.rank, None):  # it has gone on since it said where it is
            rank.tell(self.number, "where")

    def note_death(self, rank: RankProcess) -> None:
        rank.process.join(END_LIMIT_S)
        self.dead[rank.rank] = rank.process.exitcode or 0

    def explain(self, timeout_s: float) -> failure_report.RankError:
        """Find the failure that caused the others."""
        if self.starting and guard.NO_GUARD in self.dead.values():
            return guard.missing()
        ranks = self.whereabouts()
        if self.dead:
            first = next(iter(self.dead))
            return failure_report.died(first, self.dead[first], ranks, self.relay.text(first), self.starting)
        return hang_report.explain(timeout_s, ranks, self.failures.values())

    def whereabouts(self) -> list[Whereabouts]:
        """Ask every living rank where it is, and wait until all is known or the patience ends."""
        self.ask()
        start = time.monotonic()
        while not self.settled(time.monotonic() - start):
            self.listen(0.02)
        self.ask_for_stacks([rank for rank in self.ranks if rank.rank not in self.where.keys() | self.dead.keys()])
        return [self.one(rank) for rank in self.ranks]

    def ask(self) -> None:
        self.where.clear()
        for rank in self.ranks:
            rank.tell(self.number, "where")

    def settled(self, waited_s: float) -> bool:
        idle = self.answers.keys() | self.failures.keys() | self.dead.keys()
        known = self.where.keys() | self.dead.keys()
        everybody = len(self.ranks)
        return waited_s > ANSWER_S or len(known) == everybody and (waited_s > SETTLE_S or len(idle) == everybody)

    def one(self, rank: RankProcess) -> Whereabouts:
        """What is known of one rank, from its answer or, if it gave none, from its stack."""
        if rank.rank in self.dead:
            reason = failure_report.why_died(self.dead[rank.rank])
            return Whereabouts(rank.rank, "died", self.line_from_stack_file(rank), detail=f"died: {reason}")
        found = self.where.get(rank.rank) or Whereabouts(rank.rank, "silent", self.line_from_stack_file(rank))
        if failure := self.failures.get(rank.rank):
            found.status, found.line = "raised", failure.line
            found.detail = "" if failure.talking else failure.error_type
        elif rank.rank in self.answers:
            found.status, found.line = "returned", None
        return found

    def ask_for_stacks(self, silent: list[RankProcess]) -> None:
        """Have faulthandler write the stacks of ranks whose Python threads cannot run."""
        for rank in silent:
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR2)
        if silent:
            time.sleep(SETTLE_S)  # it gives no sign when it is done

    def line_from_stack_file(self, rank: RankProcess) -> Line | None:
        """The main thread's line, as faulthandler wrote it on our signal or on a crash."""
        return line_in_dump((self.relay.folder / f"rank{rank.rank}.stack").read_text())

    def in_step(self) -> bool:
        """Whether every rank is idle, none failed by talking, and all have entered the same collectives."""
        if self.dead or len(self.answers) + len(self.failures) < len(self.ranks):
            return False
        if any(failure.talking or failure.during == "start" for failure in self.failures.values()):
            return False
        ranks = self.whereabouts()
        return not wait_graph.find_uneven(ranks) and all(w.status != "silent" for w in ranks)
