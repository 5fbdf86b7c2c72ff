"""Who is to blame for each fault, as its author knows it, whatever the launcher says today?

One row for each program of `faults_on_ranks` and `faults_talking_on_ranks`. A rank outside `culprits` is innocent:
naming it is worse than naming none. Naming none is right only where several ranks share the blame or an honest
report cannot tell. Three programs have no bug and must return their values. `judge` compares a row with what the
launcher did; `test_faults` asserts it, and `try_faults` prints the whole table.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddp_course import RankError
from tests.launcher import faults_on_ranks as own
from tests.launcher import faults_talking_on_ranks as talk

VERDICTS = ("ok", "cannot tell", "wrong accusation", "vague", "missed", "blocked")
UNSURE = "The calls alone do not tell who is wrong"  # an honest report's words


@dataclass(frozen=True)
class Fault:
    """One program and the truth about it.

    Attributes:
        run: what every rank runs.
        culprits: the ranks that can fairly be named; empty when no rank can.
        operation: a regular expression that a good report contains; for a rank that fails by itself, its error.
        why: the bug, in one sentence.
        cannot_tell: an honest report may name no rank.
        returns: the values by rank, for a program without a bug.
        timeout_s: the longest that a rank may wait in a collective.
    """

    run: Callable
    world_size: int
    culprits: set[int]
    operation: str
    why: str
    cannot_tell: bool = False
    returns: list | None = None
    timeout_s: float = 2.0

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def innocent(self) -> set[int]:
        return set(range(self.world_size)) - self.culprits

    @property
    def may_name_none(self) -> bool:
        return self.cannot_tell or len(self.culprits) != 1

    @property
    def lines(self) -> list[tuple[str, int]]:
        """File names and numbers of the lines of which a good report shows one; none where no report can know it."""
        path = Path(inspect.getsourcefile(self.run))
        numbered = enumerate(path.read_text().splitlines(), 1)
        return [(path.name, number) for number, line in numbered if line.endswith(f"# fault: {self.name}")]

    def shows_line(self, report: str) -> bool:
        """Whether the report quotes one of the lines, or names its file and number."""
        if not self.lines or f"# fault: {self.name}\n" in report + "\n":
            return True
        named = (rf"{re.escape(file)}\W{{1,3}}(line )?{number}\b" for file, number in self.lines)
        return any(re.search(line, report) for line in named)


def judge(fault: Fault, error: RankError | None, values: list | None) -> tuple[str, str]:
    """Compare what the launcher did with the truth.

    Args:
        error: what `launch` raised; None when it returned `values`.
    Returns:
        One of `VERDICTS`, the worst that holds, and what is wrong; "ok" and "" when nothing is.
    """
    if fault.returns is not None:
        if error is not None:
            return "wrong accusation", "nothing is wrong with this program"
        return ("ok", "") if values == fault.returns else ("missed", f"expected {fault.returns}, got {values}")
    if error is None:
        return "missed", f"returned {values}"
    if error.rank in fault.innocent:
        return "wrong accusation", f"named rank {error.rank}, not {sorted(fault.culprits) or 'none'}"
    lacks = []
    unsure = UNSURE in error.report and all(f"rank {rank} " in error.report for rank in fault.culprits)
    if error.rank is None and not fault.may_name_none and not unsure:
        lacks.append(f"rank {min(fault.culprits)}")
    # The program's own name must not pass for the operation. Long lines of a report are folded.
    if not re.search(fault.operation, " ".join(error.report.replace(fault.name, "").split())):
        lacks.append(f"/{fault.operation}/")
    if not fault.shows_line(error.report):
        lacks.append(" or ".join(f"{file}:{number}" for file, number in fault.lines))
    if lacks:
        return "vague", "lacks " + ", ".join(lacks)
    return ("cannot tell", "names both") if error.rank is None and not fault.may_name_none else ("ok", "")


RAISES = [
    Fault(own.raises_in_the_middle, 4, {2}, "mat1 and mat2", "Rank 2 alone has a batch of 7 features."),
    Fault(own.all_raise_the_same, 3, {0, 1, 2}, "KeyError: 'learning_rate'", "Every rank reads a key that is not set."),
    Fault(own.error_that_cannot_be_printed, 2, {1}, "BadSample", "The exception's own __str__ raises."),
    Fault(
        own.error_that_cannot_be_unpickled,
        3,
        {0},
        r"ShapeMismatch.*expected \(4, 8\)",
        "Unpickling the exception calls its constructor with the wrong arguments.",
    ),
    Fault(own.chained_errors, 3, {1}, "KeyError: 'label'", "The cause is the missing label, below what was raised."),
    Fault(own.out_of_memory, 2, {1}, "RuntimeError|MemoryError", "Rank 1 asks for 4 petabytes."),
    Fault(own.file_missing, 2, {1}, "FileNotFoundError", "Rank 1's shard was never written."),
    Fault(own.no_such_gpu, 2, {1}, "(?i)cuda", "Rank 1 asks for a GPU that no machine here has."),
    Fault(own.asks_the_user, 2, {0}, "EOFError|input", "Rank 0 asks at a terminal that ranks do not have."),
    Fault(own.opens_the_group_twice, 2, {0, 1}, "(?i)twice", "The group is open already, on every rank."),
    Fault(own.recursion_error, 3, {2}, "RecursionError", "On rank 2 a list holds strings, which nest for ever."),
    Fault(own.loader_worker_raises, 2, {1}, "IndexError", "A damaged image in rank 1's loader process."),
]

DIES = [
    Fault(own.loader_worker_dies, 2, {1}, r"DataLoader worker", "Rank 1's loader process is killed."),
    Fault(own.exits_early, 3, {1}, "SystemExit|sys.exit|exit", "Rank 1 leaves its loop by sys.exit()."),
    Fault(own.quits, 2, {0}, "SystemExit|quit|exit", "Rank 0 quits as a script would."),
    Fault(own.leaves_by_os_exit, 3, {2}, "(?i)exit|died", "Rank 2 is gone, with status 0 and no message."),
    Fault(own.killed_for_memory, 3, {2}, "SIGKILL", "Rank 2 is killed, as when memory runs out."),
    Fault(own.terminated, 2, {0}, "SIGTERM", "Rank 0 is ended by a signal, as by a scheduler."),
    Fault(own.bad_pointer, 2, {1}, "SIGSEGV", "Rank 1 reads at address 0."),
    Fault(own.aborts, 3, {1}, "SIGABRT", "Rank 1 aborts, as C++ does on an uncaught exception."),
    Fault(own.recursion_to_death, 2, {1}, "SIGSEGV|RecursionError", "Rank 1's recursion is deeper than its stack."),
]

HANGS = [
    Fault(own.threads_deadlock, 3, {1}, "all_reduce", "Two threads of rank 1 take two locks in opposite order."),
    Fault(own.loops_for_ever, 3, {0}, "barrier", "Rank 0 steps over the number that would end its loop."),
    Fault(own.pattern_that_backtracks, 2, {1}, "all_reduce", "Rank 1 is in C and never gives up the GIL."),
    Fault(own.sleeps, 3, {1}, "all_reduce", "Rank 1 sleeps for an hour."),
    Fault(own.waits_for_its_loader, 2, {1}, "all_reduce", "A loader process of rank 1 never answers."),
    Fault(own.waits_for_another_process, 3, {0}, "barrier", "Rank 0 waits for a process that was never started."),
    Fault(own.waits_for_its_queue, 3, {2}, "all_reduce", "Nothing fills rank 2's queue a second time."),
]

RESULTS = [
    Fault(own.returns_a_generator, 2, {1}, "(?i)generator", "A generator cannot be pickled."),
    Fault(
        own.returns_what_cannot_be_unpickled,
        2,
        {1},
        "(?i)result|pickl|travel",
        "The result opens, where it is unpickled, a file that is not there.",
    ),
    Fault(
        own.returns_what_unpickles_for_an_hour,
        2,
        {1},
        "(?i)result|Connection",
        "The result sleeps while the launcher unpickles it.",
    ),
]

DDP = [
    Fault(own.ddp_uneven_batches, 3, {2}, "all_reduce|backward", "Rank 2 has three batches, the rest have four."),
    Fault(own.ddp_unused_parameter, 2, {1}, "(?i)unused|reduction", "Rank 1 leaves one head out of its loss."),
    Fault(own.ddp_skips_backward, 2, {1}, "all_reduce|backward", "Rank 1 skips one backward, after a loss of NaN."),
    Fault(own.ddp_two_backwards, 3, {2}, "all_reduce|backward", "Rank 2 takes its batch in two parts."),
    Fault(
        own.ddp_validates_on_rank_0,
        3,
        {0},
        "broadcast",
        "A forward through DDP broadcasts the buffers, and only rank 0 validates.",
    ),
    Fault(own.ddp_other_model, 3, {1}, "(?i)param", "Rank 1's model has a layer more."),
    Fault(own.ddp_other_shapes, 3, {2}, "(?i)param", "Rank 2's model has a class more."),
]

LEFT_OUT = [
    Fault(talk.async_never_entered, 3, {1}, "all_reduce", "Rank 1 never enters what ranks 0 and 2 wait for."),
    Fault(
        talk.async_never_entered_nor_waited_for,
        3,
        {1},
        "all_reduce",
        "Rank 1 never enters it, and ranks 0 and 2 return without waiting, with numbers that were never summed.",
    ),
    Fault(talk.functional_left_out, 3, {2}, "all_reduce", "Rank 2 leaves out a functional all_reduce."),
    Fault(talk.monitored_barrier_left_out, 3, {2}, "(?i)monitored_?barrier", "Rank 2 leaves out the barrier."),
    Fault(
        talk.barrier_on_rank_0,
        3,
        {0},
        "barrier",
        "The barrier is inside `if rank == 0`: two of three ranks rightly never come.",
        cannot_tell=True,
    ),
    Fault(
        talk.barrier_of_a_subgroup, 4, {1}, "barrier", "Rank 1 is a member and leaves the barrier out; 3 is not one."
    ),
    Fault(talk.one_call_too_many, 4, {2}, "all_reduce", "Rank 2's loop has one step more."),
    Fault(talk.one_call_too_few, 3, {1}, "all_reduce", "Rank 1's loop has one step fewer."),
    Fault(
        talk.one_call_too_few_then_the_loss,
        3,
        {2},
        "all_reduce",
        "Rank 2's loop is a step short, so its loss meets the gradients of the rest.",
    ),
    Fault(talk.skips_a_bad_batch, 3, {1}, "all_reduce", "Rank 1 catches an error and leaves out that step's call."),
    Fault(
        talk.swallows_the_timeout,
        3,
        {1},
        "all_reduce",
        "Rank 1 leaves the call out, and the ranks that time out catch the error and return a made-up loss.",
    ),
    Fault(
        talk.reports_its_error_by_a_collective,
        3,
        {1},
        "all_reduce",
        "Rank 1's except clause calls a collective that the rest, without an error, never call. Where rank 1 comes "
        "first, the rest are told of the disagreement, an error too; all report it, and what rank 1 raises is its own.",
    ),
    Fault(talk.leaves_the_group_early, 3, {0}, "all_reduce", "Rank 0 destroys its group after the first of two steps."),
    Fault(talk.unpicklable_object, 3, {1}, "pickle", "Rank 1 gathers a generator, which cannot be pickled."),
]

GROUPS = [
    Fault(
        talk.wrong_subgroup,
        4,
        {3},
        "all_reduce",
        "Rank 3 uses its column for its row, so it waits for rank 1, which rightly never comes, and 2 waits for 3.",
        cannot_tell=True,
    ),
    Fault(talk.not_a_member, 3, {2}, "all_reduce", "Rank 2 is not in the group, so its call does nothing."),
    Fault(
        talk.groups_made_in_another_order,
        4,
        {3},
        "barrier|new_group",
        "Rank 3 makes the groups in another order, so its left is the right of the rest.",
        cannot_tell=True,
    ),
    Fault(
        talk.group_made_by_its_members,
        3,
        {2},
        "new_group|all_reduce",
        "Rank 2 leaves out a new_group that every rank must call, so later groups do not meet.",
        cannot_tell=True,
    ),
    Fault(
        talk.two_groups_in_opposite_order,
        2,
        set(),
        "all_reduce",
        "Each rank waits for the other in another group; either order would do.",
        cannot_tell=True,
    ),
    Fault(
        talk.three_groups_in_a_ring,
        3,
        set(),
        "all_reduce",
        "Each rank waits for the next, all round the ring.",
        cannot_tell=True,
    ),
    Fault(
        talk.threads_that_race,
        2,
        set(),
        "all_reduce",
        "Two threads of each rank use one group in whatever order they come.",
        cannot_tell=True,
    ),
]

STORE = [
    Fault(talk.key_nobody_sets, 3, set(), "(?i)store", "Every rank waits for a key that none sets.", cannot_tell=True),
    Fault(talk.key_one_rank_waits_for, 3, {1}, "(?i)store", "Rank 1 alone reads a key that none sets."),
]

MESSAGES = [
    Fault(
        talk.send_without_recv,
        3,
        {0, 1},
        "send",
        "Rank 0 sends and rank 1 does not receive: one call too many or one too few.",
        cannot_tell=True,
    ),
    Fault(
        talk.recv_without_send,
        3,
        {0, 1},
        "recv",
        "Rank 1 receives and rank 0 does not send: one call too many or one too few.",
        cannot_tell=True,
    ),
    Fault(talk.tags_differ, 2, {0, 1}, "recv|tag", "One sends with tag 1, one receives with tag 2.", cannot_tell=True),
    Fault(talk.wrong_peer, 4, {2}, "send|recv", "Rank 2 sends to rank 0, and rank 3 waits for its message."),
    Fault(
        talk.isend_to_a_rank_that_left,
        3,
        {0, 1},
        "send",
        "Rank 0 does not wait for its send, and rank 1 never receives it: the message is lost.",
        cannot_tell=True,
    ),
    Fault(
        talk.everyone_sends_first,
        3,
        set(),
        "send",
        "A send returns once it is received, and every rank would receive after its send.",
        cannot_tell=True,
    ),
    Fault(
        talk.half_an_exchange, 3, {1}, r"recv|\.wait\(", "Rank 1 receives and does not send, so rank 2 waits for it."
    ),
]

MISMATCHES = [
    Fault(talk.broadcast_from_another, 3, {2}, "broadcast", "Rank 2 names itself as the source."),
    Fault(talk.scatter_from_another, 3, {1}, "scatter", "Rank 1 names itself as the source."),
    Fault(talk.gather_to_another, 3, {2}, "gather", "Rank 2 names itself as the destination."),
    Fault(
        talk.each_reduces_to_itself,
        2,
        {0, 1},
        "reduce",
        "Each rank names itself as the destination.",
        cannot_tell=True,
    ),
    Fault(talk.objects_of_another_number, 3, {2}, "broadcast", "Rank 2 expects one object of two."),
    Fault(
        talk.integers_meet_floats, 3, {2}, "all_reduce", "Rank 2's counts are int32, whose bits are added as floats."
    ),
    Fault(talk.bool_meets_uint8, 3, {1}, "all_reduce|(?i:bool|scalar type)", "Rank 1's mask is bool, not uint8."),
    Fault(talk.max_meets_sum, 3, {2}, "all_reduce", "Rank 2 takes the largest loss, the rest the sum."),
    Fault(talk.sizes_differ, 3, {2}, "all_reduce", "Rank 2's tensor has one element more."),
    Fault(talk.gathers_another_shape, 3, {2}, "all_gather", "Rank 2's last batch is short."),
    Fault(talk.too_few_inputs, 3, {1}, "reduce_scatter|input", "Rank 1 has a shard too few."),
    Fault(talk.splits_do_not_match, 3, {1}, "(?i)all_?to_?all", "Rank 1 sends two tokens where one is expected."),
    Fault(talk.barrier_meets_all_reduce, 3, {2}, "all_reduce", "Rank 2 is in a barrier, the rest in an all_reduce."),
]

NO_FAULT = [
    Fault(
        own.slow_but_in_time,
        2,
        set(),
        "",
        "Rank 1 is slow, and comes within the limit.",
        returns=[1.0, 1.0],
        timeout_s=6.0,
    ),
    Fault(
        own.slow_while_nobody_waits,
        2,
        set(),
        "",
        "Every rank computes for longer than a collective may wait, outside of any.",
        returns=[1.0, 1.0],
    ),
    Fault(
        own.all_recover_together,
        3,
        set(),
        "",
        "Every rank catches the same error in the same step, and all stay in step.",
        returns=[6.0, 6.0, 6.0],
    ),
]

FAULTS = [*RAISES, *DIES, *HANGS, *RESULTS, *DDP, *LEFT_OUT, *GROUPS, *STORE, *MESSAGES, *MISMATCHES, *NO_FAULT]
