"""Do the profiler's records become the right spans, on one clock, with torch's DDP and with the course's?"""

from dataclasses import replace

import pytest
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch
from ddp_course.launcher.lines import Line
from ddp_course.launcher.rank_status import Collective
from ddp_course.parallel import BucketedDDP
from ddp_course.scaling import trace
from ddp_course.scaling.spans import Span, exposed_seconds, merge_ranks, overlapped_share, starts_inside_backward
from tests.scaling import trace_on_ranks as on_ranks

pytestmark = pytest.mark.timeout(120)

NODE = "autograd::engine::evaluate_function: "


def event(name, ts, dur, cat="cpu_op", **args):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": args}


def marked(stage, ts, dur):
    return event(f"ddp_course:{stage}", ts, dur, "user_annotation")


def gloo(op, ts, dur, dims, kind="float"):
    types = {"Input Dims": dims, "Input type": [kind] * len(dims)}
    return event(f"gloo:{op}", ts, dur, "user_annotation", **types)


CPU_STEP = [
    {"ph": "M", "name": "process_name", "args": {}},
    marked("forward", 100, 100),
    marked("backward", 200, 500),
    event(NODE + "AddmmBackward0", 210, 90),
    event("AddmmBackward0", 215, 80),
    event(NODE + "torch::autograd::AccumulateGrad", 300, 100),
    event(NODE + "MulBackward0", 400, 50),
    event(NODE + "AddmmBackward0", 900, 50),  # of somebody else's backward pass
    gloo("all_reduce", 310, 340, [[10, 4]]),
    gloo("broadcast", 110, 20, [[3], [2]], "c10::Half"),
    marked("optimizer", 700, 20),
]


# --- The records, without ranks --------------------------------------------------------------------


def test_backward_is_its_nodes_without_the_hooks_and_what_is_left_is_waiting():
    found = [(s.lane, s.name, round(s.start_s * 1e6), round(s.end_s * 1e6)) for s in trace.spans_of(CPU_STEP)]
    assert found == [
        ("forward", "forward", 100, 200),
        ("other collective", "broadcast", 110, 130),
        ("backward", "AddmmBackward0", 210, 300),
        ("all-reduce", "all_reduce", 310, 650),
        ("backward", "MulBackward0", 400, 450),
        ("waiting", "rest of backward", 450, 700),
        ("optimizer", "optimizer", 700, 720),
    ]


def test_payload_is_elements_times_size_and_unknown_stays_unknown():
    sizes = {span.name: span.bytes for span in trace.spans_of(CPU_STEP)}
    assert (sizes["all_reduce"], sizes["broadcast"], sizes["forward"]) == (160, 10, None)
    odd = [marked("forward", 0, 1), gloo("all_reduce", 0, 1, [[2]], "c10::Float8_e5m2"), gloo("barrier", 0, 1, [])]
    assert [span.bytes for span in trace.spans_of(odd)] == [None] * 3


def test_the_offset_moves_every_span():
    first = min(trace.spans_of(CPU_STEP, offset_s=50.0), key=lambda span: span.start_s)
    assert first.start_s == pytest.approx(50.0001, abs=1e-9)


def test_a_collective_gets_the_line_that_called_it_or_none_that_might_be_wrong():
    def call(op, n_bytes, number):
        line = Line("/somewhere/train.py", number, "step", "dist.it(x)")
        return Collective(1, 1, op, "uint8", ((n_bytes,),), "", (0, 1), True, 0, line=line)

    spans = [
        Span("forward", 0.0, 1.0, "forward"),
        Span("all_reduce", 1.0, 2.0, "all-reduce", 8),
        Span("all_reduce", 1.5, 3.0, "all-reduce", 4),
        Span("send", 2.0, 3.0, "other collective", 8),
        Span("all_reduce", 3.0, 4.0, "all-reduce", 2),  # two of these for one call
        Span("all_reduce", 3.5, 4.0, "all-reduce", 2),
        Span("barrier", 4.0, 5.0, "other collective"),
    ]
    calls = [
        ("all_reduce", 8, 11),
        ("all_reduce", 4, 12),
        ("send", 8, 13),
        ("reduce_scatter", 2, 14),
        ("barrier", 0, 15),
    ]
    lined = trace.with_lines(spans, [call(*each) for each in calls])
    numbers = [11, 12, 13, None, None, 15]
    said = ["", *(f"train.py, line {number}, in step: dist.it(x)" if number else "" for number in numbers)]
    assert [span.line for span in lined] == said
    assert [replace(span, line="") for span in lined] == spans


def test_on_a_gpu_a_kernel_belongs_to_the_stage_that_launched_it():
    def kernel(name, ts, dur, correlation, cat="kernel", **args):
        return event(name, ts, dur, cat, correlation=correlation, **args)

    def launched(ts, correlation):
        return event("cudaLaunchKernel", ts, 1, "cuda_runtime", correlation=correlation)

    nccl = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Half"}
    events = [
        marked("forward", 0, 10),
        marked("backward", 10, 20),
        event(NODE + "AddmmBackward0", 12, 3),
        launched(2, 1),
        launched(13, 2),
        launched(14, 3),
        launched(15, 4),
        kernel("gemm", 40, 30, 1),  # long after its stage's range
        kernel("gemm", 70, 50, 2),
        kernel("ncclDevKernel_AllReduce_Sum_f16_RING_LL", 90, 60, 3, **nccl),
        kernel("Memset (Device)", 121, 1, 4, "gpu_memset"),
        kernel("of nobody", 200, 5, 99),
    ]
    found = [(s.lane, s.name, round(s.start_s * 1e6), s.bytes) for s in trace.spans_of(events)]
    assert found == [
        ("forward", "gemm", 40, None),
        ("backward", "gemm", 70, None),
        ("all-reduce", "allreduce", 90, 2000),
        ("backward", "Memset (Device)", 121, None),
    ]
    assert exposed_seconds(trace.spans_of(events)) == pytest.approx(29e-6)  # 120 to 121, and 122 to 150


def test_the_clock_comes_from_the_narrowest_pair_of_readings():
    # 1,000 us on the profiler's clock is 7 s on the machine's; the wide pair would say 3 s more.
    readings = [(0, 20_000_000_000), (7_000_000_000 - 500, 7_000_000_000 + 500)]
    assert trace.clock_offset_s(readings, [0.0, 1000.0]) == pytest.approx(7.0 - 1e-3, abs=1e-9)
    with pytest.raises(ValueError, match="expected 2 clock ranges in the records, found 1"):
        trace.clock_offset_s(readings, [0.0])


# --- On ranks --------------------------------------------------------------------------------------


WAYS = {
    "torch's DDP": (DistributedDataParallel, {}),
    "BucketedDDP": (BucketedDDP, {"first_bucket_mb": on_ranks.BUCKET_MB}),
}


@pytest.fixture(scope="module", params=WAYS)
def gated(request, two_ranks):
    return two_ranks.run(on_ranks.gated_step, args=WAYS[request.param])


def test_the_first_all_reduce_starts_while_backward_goes_on(gated):
    for spans, _, _ in gated:
        inside = starts_inside_backward(spans)
        assert len(inside) >= 3 and inside[0] is True


def test_the_buckets_carry_every_gradient_once(gated):
    for spans, _, payload in gated:
        assert sum(span.bytes for span in spans if span.lane == "all-reduce") == payload
        assert all("dist.all_reduce(bucket" in span.line for span in spans if span.lane == "all-reduce")


def test_every_lane_is_there_in_order_and_the_share_is_between_0_and_1(gated):
    for spans, _, _ in gated:
        first = {lane: next(s for s in spans if s.lane == lane) for lane in trace.STAGES}
        assert first["forward"].end_s <= first["backward"].start_s
        assert first["waiting"].end_s <= first["optimizer"].start_s
        names = [span.name for span in spans if span.lane == "backward"]
        assert names.count("AddmmBackward0") == on_ranks.LAYERS
        assert 0 <= overlapped_share(spans) <= 1  # how much depends on the machine


def test_no_collective_starts_inside_no_sync(gated):
    for _, spans, _ in gated:
        assert {span.lane for span in spans} == {"forward", "backward", "waiting", "optimizer"}


def test_what_is_reduced_after_backward_starts_after_it_and_hides_nothing(two_ranks):
    for spans in two_ranks.run(on_ranks.reduced_after_backward):
        assert starts_inside_backward(spans) == [False] * 4
        assert [span.bytes for span in spans if span.lane == "all-reduce"] == [128, 32, 64, 16]
        assert overlapped_share(spans) == pytest.approx(0, abs=1e-9)
        lines = {span.line.partition(", in ")[2] for span in spans if span.lane == "all-reduce"}
        assert lines == {"step: dist.all_reduce(parameter.grad)"}


def test_ranks_are_on_one_clock_to_a_millisecond(two_ranks):
    one, two = merge_ranks(two_ranks.run(on_ranks.ping_pong))
    held = [[span for span in spans if span.lane == "forward"] for spans in (one, two)]
    turns = [span for pair in zip(*held, strict=True) for span in pair]  # rank 0, rank 1, rank 0, ...
    assert len(turns) == 8
    for before, after in zip(turns, turns[1:], strict=False):
        # Nobody holds the message before the other has sent it.
        assert before.end_s <= after.start_s + 1e-3
    assert {span.name for span in one if span.lane == "other collective"} == {"send", "recv"}


def test_a_single_rank_and_what_is_refused():
    said = launch(on_ranks.refusals, 1, start_method="forkserver", quiet=True)[0]
    assert said == [
        "ValueError: no stage in the records; wrap each part: with stage('backward'): loss.backward()",
        "ValueError: stage 'backwards' is not known; choose from forward, backward, waiting, optimizer",
    ]
