"""What is the loss, over all ranks?

Each rank knows the loss of its own rows. The loss of all rows is the sum over ranks divided by the count over
ranks. The mean of the ranks' means is another number as soon as one rank has fewer rows than another.

`MeanMetrics` keeps sums and counts where they arise, on the device, and reduces all of them by one collective.
`mean_over_ranks` is the same for a single number that is needed at once. `each_rank` is for what is no mean, such
as the time of the slowest rank.

Left out on purpose: metrics that are neither a mean nor computed from means, such as the area under a ROC curve.
They need every row in one place: gather the rows.
Read next: `checkpoint/file.py`, how a run's state comes to disk whole.

Shapes: M metrics, padded to `SLOTS`; W ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_course.groups import my_device

SLOTS = 32  # metrics in one MeanMetrics at most; the message has this size whatever the names, see `_pack`


def mean_over_ranks(
    total: float | torch.Tensor, count: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Return the sum of all ranks' totals over the sum of their counts, the same on every rank.

    Args:
        total: this rank's sum, of losses or of correct answers; not its mean.
        count: the rows in that sum; may be 0 on some ranks.
        device: where the group's backend takes its tensors from.
    Raises:
        ValueError: no rank has a row.
    Collective: one all_reduce of two numbers, every rank of `group`.
    """
    total_and_count = torch.tensor([float(total), float(count)], dtype=torch.float64, device=device)
    dist.all_reduce(total_and_count, group=group)
    all_total, all_count = total_and_count.tolist()
    if all_count == 0:
        raise ValueError("there is no mean: no rank has a row; look at the size of the dataset")
    return all_total / all_count


def each_rank(value: float, group: dist.ProcessGroup | None = None) -> list[float]:
    """Return every rank's value, by rank, the same list on every rank: `max` of it is the slowest rank's time.

    Collective: one all_gather of one number, every rank of `group`.
    """
    mine = torch.tensor([value], dtype=torch.float64, device=my_device(group))
    values_W = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(values_W, mine, group=group)
    return torch.cat(values_W).tolist()


# --- Many means, one collective --------------------------------------------------------------------


class MeanMetrics:
    """Sums and counts of several metrics, reduced over the ranks together.

        metrics = MeanMetrics("loss", "accuracy")
        metrics.add(len(label_N), loss=loss * len(label_N), accuracy=guess_N == label_N)   # in every step
        means = metrics.reduce()                                                           # now and then

    The names are declared, so that a rank without a single row knows them too.

    Attributes:
        names: as declared.
        not_finite: for each metric of the last `reduce` that was nan or infinite somewhere, the ranks that brought
            it so. Its mean is then nan or infinite as well. Empty on ranks that did not receive the means.
    """

    def __init__(self, *names: str, group: dist.ProcessGroup | None = None) -> None:
        """Declare the metrics; no rank is talked to.

        Raises:
            ValueError: no name, a name twice, or more than `SLOTS` names.
        """
        if not 1 <= len(names) <= SLOTS or len(set(names)) < len(names):
            raise ValueError(f"expected 1 to {SLOTS} different names of metrics, found {list(names)}")
        self.names, self.group = names, group
        self.not_finite: dict[str, list[int]] = {}
        self._forget()

    def add(self, rows: int | torch.Tensor, **sums: float | torch.Tensor) -> None:
        """Add one batch. Nothing waits for the device: tensors are added where they are.

        Args:
            rows: how many rows the sums are over; a mask of the rows counts its ones.
            sums: for some or all of the metrics, the *sum* over these rows, or one value per row. A loss that is
                a mean already must be multiplied by the rows.
        Raises:
            ValueError: a metric was not declared.
        """
        unknown = sorted(set(sums) - set(self.names))
        if unknown:
            raise ValueError(f"{unknown} were not declared; this MeanMetrics has {list(self.names)}")
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + _total(value)
            self._counts[name] = self._counts[name] + _total(rows)

    def reduce(self, dst: int | None = None) -> dict[str, float] | None:
        """Return the mean of each metric over the rows of all ranks, and begin again.

        Args:
            dst: the rank of the group that needs the means; None is for every rank.
        Returns:
            The means by name, in the order declared; None on ranks that are not `dst`.
        Raises:
            RuntimeError: another rank declared other names; tells which rank. This and the next are raised only on
                ranks that would get the means.
            ValueError: no rank has a row of some metric; or, on every rank, there is no rank `dst`.
        Collective: one all_reduce, or one reduce if `dst` is given; every rank of the group, those without rows too.
        """
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if dst is not None and not 0 <= dst < world_size:
            raise ValueError(f"rank {rank}: dst={dst} is not in the group; its ranks are 0 to {world_size - 1}")
        self.not_finite = {}
        packed = self._pack(rank, world_size, my_device(self.group))
        if dst is None:
            dist.all_reduce(packed, group=self.group)
        else:
            dist.reduce(packed, group_dst=dst, group=self.group)
        self._forget()
        if dst not in (None, rank):
            return None  # a reduce leaves anything at all in the tensors of the others
        return self._unpack(packed.tolist(), rank, world_size)

    def _forget(self) -> None:
        self._sums: dict[str, float | torch.Tensor] = dict.fromkeys(self.names, 0.0)
        self._counts: dict[str, float | torch.Tensor] = dict.fromkeys(self.names, 0)

    def _pack(self, rank: int, world_size: int, device: torch.device) -> torch.Tensor:
        """Lay out what travels: sums, counts, and two rows with a place for each rank.

        In these rows a rank writes at its own place only. Zeros come from all others, so the sum over the ranks
        leaves each place as its rank wrote it: a gather, without a second collective. It tells whose names are
        different and who brought a nan, which the sums cannot tell. The size does not depend on the names, since
        ranks that disagree about the size of a message wait for each other instead of noticing.
        """
        order = sorted(self.names)
        sums_M = _slots([self._sums[name] for name in order], device)
        counts_M = _slots([self._counts[name] for name in order], device)
        bits_M = 2.0 ** torch.arange(SLOTS, dtype=torch.float64, device=device)
        ranks_2W = torch.zeros(2, world_size, dtype=torch.float64, device=device)
        ranks_2W[0, rank] = fingerprint(order)
        ranks_2W[1, rank] = (bits_M * ~sums_M.isfinite()).sum()
        return torch.cat([sums_M, counts_M, ranks_2W.flatten()])

    def _unpack(self, numbers: list[float], rank: int, world_size: int) -> dict[str, float]:
        order = sorted(self.names)
        sums, counts, by_rank = numbers[:SLOTS], numbers[SLOTS : 2 * SLOTS], numbers[2 * SLOTS :]
        prints, broken = by_rank[:world_size], by_rank[world_size:]
        others = [peer for peer in range(world_size) if prints[peer] != fingerprint(order)]
        if others:
            raise RuntimeError(
                f"rank {rank}: expected every rank to reduce {order}, but other names came from rank "
                f"{', '.join(map(str, others))}; declare the same metrics on every rank"
            )
        empty = [name for name, count in zip(order, counts, strict=False) if count == 0]
        if empty:
            raise ValueError(f"there is no mean of {empty}: no rank has a row; look at the size of the dataset")
        who = {name: [peer for peer in range(world_size) if int(broken[peer]) >> i & 1] for i, name in enumerate(order)}
        self.not_finite = {name: ranks for name, ranks in who.items() if ranks}
        means = {name: sums[i] / counts[i] for i, name in enumerate(order)}
        return {name: means[name] for name in self.names}


def fingerprint(names: Sequence[str]) -> int:
    """Return a number for a list of names: equal lists, equal numbers. Below 2**48, so a float64 holds it exactly."""
    return int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:6], "big")


def _total(value: float | torch.Tensor) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return value
    # float32 has 24 bits: its sum of losses stands still once it is 2**24 times as large as one loss. Apple's GPUs
    # have nothing better; what is summed there is as exact as they can be.
    return value.detach().sum(dtype=torch.float32 if value.device.type == "mps" else torch.float64)


def _slots(values: Sequence[float | torch.Tensor], device: torch.device) -> torch.Tensor:
    slots_M = torch.zeros(SLOTS, dtype=torch.float64, device=device)
    for i, value in enumerate(values):
        slots_M[i] = value
    return slots_M
