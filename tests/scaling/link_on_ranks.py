"""Functions that the tests of link.py run on ranks."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.parallel import BucketedDDP
from ddp_course.scaling.link import LINKS, Link, SimulatedLink
from tests.refusals import message_of

QUICK = Link("quick", 1e-5, 1e9)
LIMIT_S = 20.0
SLOW = Link("slow", 0.004, 1e6)  # 4 kB a message: some 10 ms of the link
WRAPS = {
    "ours": lambda module: BucketedDDP(module, bucket_cap_mb=0.004, first_bucket_mb=0.001),
    "ours, copied": lambda module: BucketedDDP(
        module, bucket_cap_mb=0.004, first_bucket_mb=0.001, gradient_as_bucket_view=False
    ),
    "torch": lambda module: DistributedDataParallel(module, bucket_cap_mb=0.004),
    "torch, views": lambda module: DistributedDataParallel(module, bucket_cap_mb=0.004, gradient_as_bucket_view=True),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(24, 24), nn.Tanh())), nn.Linear(24, 3))


def train(rank, wrap, link):
    """Gradients after each of three steps, one of them with accumulation."""
    replica = WRAPS[wrap](model())
    if link is not None:
        link.attach(replica)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        if step == 1:
            with replica.no_sync():
                replica(torch.randn(5, 24, generator=generator)).square().mean().backward()
        replica(torch.randn(5, 24, generator=generator)).square().mean().backward()
        found.append([param.grad.clone() for param in replica.parameters()])
        optimizer.step()
    return found


def equal_bits(rank, world_size):
    """By kind of replica: are all gradients over the link those without it, to the last bit? And how many messages."""
    answers = {}
    for wrap in WRAPS:
        plain = train(rank, wrap, None)
        with SimulatedLink(QUICK) as link:
            carried = train(rank, wrap, link)
            messages = len(link.spans())
        pairs = [pair for step in zip(plain, carried, strict=True) for pair in zip(*step, strict=True)]
        answers[wrap] = all(torch.equal(*pair) for pair in pairs), messages
    return answers


def carried(rank, world_size):
    """Three messages at once, then one launched late by the last rank.

    Returns, for each: the link's span, when its future was done, when this rank launched it, and the sum.
    """
    notes = []
    with SimulatedLink(SLOW) as link:

        def send(number, nbytes):
            flat = torch.full((nbytes // 4,), float(rank + 1))
            note = {"launched_s": time.monotonic(), "number": number}
            notes.append(note)
            noted = threading.Event()

            def note_arrival(done):
                note.update(done_s=time.monotonic(), sum=done.value()[0].item())
                noted.set()

            link.all_reduce(flat).add_done_callback(note_arrival)
            return noted

        dist.barrier()
        for noted in [send(number, nbytes) for number, nbytes in enumerate((4000, 400, 8000))]:
            assert noted.wait(LIMIT_S)
        dist.barrier()
        if rank == world_size - 1:
            SLOWEST.wait(0.03)
        assert send(3, 4000).wait(LIMIT_S)
        spans = link.spans()
        assert all(span.start_s >= launched_s for span, launched_s in zip(spans, link.launches(), strict=True))
        assert spans[3].start_s == link.launches()[3]  # nothing to queue behind
        assert all(note["done_s"] >= s.end_s + late for note, s, late in zip(notes, spans, link.late_s(), strict=True))
        link.clear()
        assert link.spans() == link.launches() == link.late_s() == []
        assert send(4, 4000).wait(LIMIT_S)
        assert link.spans() == link.spans()[:1] and len(link.spans()) == 1
        text = str(link)
    with SimulatedLink(Link("no obstacle", 0.0, 1e15)) as link:
        link.all_reduce(torch.zeros(1000)).wait()
        assert link.late_s()[0] > 0  # nothing real takes so little time
        link.clear()
        begin_s = time.monotonic()
        for future in [link.all_reduce(torch.zeros(100_000)) for _ in range(12)]:
            future.wait()
        launched_s, ended_s = link.launches(), link.real_ends()
        assert len(ended_s) == 12 and all(begin_s < n < m for n, m in zip(launched_s, ended_s, strict=True))
        assert max(ended_s) <= time.monotonic()
    return spans, notes[:4], text


SLOWEST = threading.Event()  # never set: waiting for it is a sleep that says what it stands for


def waiting(rank, world_size):
    """Seconds that a message was held back, and this process's CPU seconds meanwhile; threads before and after."""
    before = threading.active_count()
    with SimulatedLink(Link("very slow", 0.0, 1e4)) as link:
        link.all_reduce(torch.zeros(1)).wait()
        dist.barrier()
        start_s, cpu_s = time.monotonic(), time.process_time()
        link.all_reduce(torch.zeros(2500)).wait()  # 10 kB: (W - 1) / W of 2 s
        held_s, cpu_s = time.monotonic() - start_s, time.process_time() - cpu_s
        (_, span) = link.spans()
        during = threading.active_count()
    return held_s, cpu_s, span.end_s - span.start_s, (before, during, threading.active_count())


def closed_early(rank, world_size):
    """What waiting for a message says when the link was closed before it arrived; and what sending says then."""
    link = SimulatedLink(Link("stopped", 3600.0, 1.0))
    futures = [link.all_reduce(torch.zeros(1)) for _ in range(2)]
    real = torch.zeros(1)
    dist.all_reduce(real)  # the two before it are done for real, or nearly so
    link.close()
    link.close()
    return [*map(message_of, (future.wait for future in futures)), message_of(lambda: link.all_reduce(torch.zeros(1)))]


def refusals(rank, world_size):
    """What attach and the constructor say to what they cannot take."""
    other = dist.new_group(list(range(world_size)))
    with SimulatedLink(LINKS["10gbe"]) as link:
        replicas = model(), BucketedDDP(model(), process_group=other)
        said = [message_of(lambda replica=replica: link.attach(replica)) for replica in replicas]
    said.append(message_of(lambda: SimulatedLink(LINKS["10gbe"], algorithm="star")))
    dist.barrier()
    dist.destroy_process_group(other)
    return said
