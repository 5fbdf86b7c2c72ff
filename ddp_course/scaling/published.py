"""What would the simulation have said of the clusters on which DDP was published?

Li et al. measured what overlap saves on 32 GPUs, and how a step grows up to 256. Here stand the same networks, their
layers written out, on a link with the figures of that hardware; nothing is fitted to the published numbers. Where the
two differ, `DISCUSSION` says by how much, and what the simulation does not know.

Left out on purpose: NVLink inside a server. A ring through several servers is as quick as its slowest hop, the network.
Read next: `simulate.py`, the prediction; the paper, arXiv 2006.15704, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ddp_course.parallel.bucketing import MIB
from ddp_course.scaling.link import LINKS, Link
from ddp_course.scaling.simulate import Prediction, predict
from ddp_course.scaling.step_profile import Gradient, Profile

CAP_BYTES = 25 * MIB  # DDP's default
GPUS = 32
MEMORY_BYTES_PER_S = 900e9  # V100


@dataclass(frozen=True)
class Assumption:
    """Something that the prediction rests on."""

    what: str
    value: str
    why: str


ASSUMPTIONS = (
    Assumption("cluster", "4 servers with 8 V100 each, one 100 Gbit/s port a server", "the paper, section 5"),
    Assumption("numbers", "float32: 4 bytes a gradient", "torch's default"),
    Assumption("ResNet-50", "25.6 M parameters, 32 images a GPU, 97 ms a step without DDP",
               "torch, benchmarks/distributed/ddp/README.md, V100; not from the paper"),
    Assumption("BERT", "BERT-large, 334 M parameters, 7 sentences a GPU, 926 ms a step without DDP",
               "NVIDIA DeepLearningExamples, README of BERT in 2019, DGX-1 with V100 32 GB; not from the paper"),
    Assumption("backward", "two thirds of forward and backward", "two products of matrices a layer for one in forward"),
    Assumption("a layer's time", "in proportion to its multiplications", "what moves much memory takes longer"),
    Assumption("optimizer", "SGD: reads two numbers and writes one per parameter, at 900 GB/s", "V100's data sheet"),
    Assumption("NCCL", "a ring over all GPUs at 12 GB/s, 14 us a step, inside a server too", "LINKS['100gbe']"),
    Assumption("gloo", "a ring over all processes at 1.18 GB/s, 20 us a step, as LINKS['10gbe']",
               "no source: staged through the host's memory, by TCP, it does not fill 100 Gbit/s"),
    Assumption("buckets", "25 MiB, the first 1 MiB", "DDP's defaults"),
    Assumption("without overlap", "the same buckets, all after backward", "the paper, section 5.1"),
    Assumption("the published figures", "shares of the step without overlap",
               "the paper's word is speedup; as a quotient of speeds, 38.0 % would be 27.5 % of the step"),
    Assumption("what overlap costs", "nothing", "in truth all_reduce and backward share the GPU"),
)  # fmt: skip


@dataclass(frozen=True)
class Saving:
    """What overlap saves of a step, published and predicted."""

    network: str
    backend: str
    published: float  # of the step without overlap
    predicted: float
    prediction: Prediction
    most: float  # that any bandwidth would save
    bytes_per_s_for_published: float | None  # at which the prediction would equal the published saving


PUBLISHED_SAVINGS = {
    ("ResNet-50", "NCCL"): 0.380,
    ("BERT", "NCCL"): 0.352,
    ("ResNet-50", "gloo"): 0.268,
    ("BERT", "gloo"): 0.215,
}
BACKENDS = {"NCCL": LINKS["100gbe"], "gloo": LINKS["10gbe"]}
# torch's benchmarks/distributed/ddp/README.md: ResNet-50, 32 images a GPU, V100, 8 a machine; without DDP 0.097 s.
PUBLISHED_STEPS_S = {2: 0.103, 4: 0.103, 8: 0.104, 16: 0.104}
PUBLISHED_SLOWDOWN_256 = 2.0  # Li et al., section 5.3: a step on 256 GPUs takes twice as long as on one

DISCUSSION = """\
gloo: prediction and paper are a few points apart, but on a bandwidth that was assumed and not measured. Worth little.
NCCL: overlap saved about twice what is predicted. While backward is two thirds of computing, no network lets overlap
save more than two fifths of a step, and that only where communication takes as long as backward. The published figures
are near it, so NCCL's collectives must have taken about as long as backward: as on 2.9 GB/s for ResNet-50 and 4.5 GB/s
for BERT, not 12. Smaller batches than assumed would do it, or collectives slower than the port, or both; the figures
alone do not tell which.
torch's own benchmark, with known rows, is 5 to 6 % above the prediction. 3 % of it is there with a single GPU already
(0.100 s for 0.097 s): what DDP costs by itself. The rest is computing that shares the GPU with communication.
256 GPUs: a tenth more time is predicted, the paper has twice the time. Its GPUs were shared with other jobs, and in
other places for each run. A link of one's own and ranks that are all equally fast are what this simulation takes for
granted: it says what a ring must cost at least, not what a cluster adds."""


# --- The networks, layer by layer ------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    name: str
    params: int
    work: float  # multiplications, in any unit


def resnet50() -> list[Layer]:
    """The layers of ResNet-50 for images of 224x224, a convolution with its BatchNorm as one.

    Source: He et al. 2015 (arXiv 1512.03385), table 1; a stage's stride is in its first 3x3 convolution, as in
    torchvision.
    """
    layers = [_conv("stem", 3, 64, 7, 112)]
    channels, side = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            before = side
            side = side // 2 if stage > 1 and block == 0 else side
            name = f"stage {stage}, block {block}"
            layers += [
                _conv(f"{name}, 1x1 in", channels, width, 1, before),
                _conv(f"{name}, 3x3", width, width, 3, side),
                _conv(f"{name}, 1x1 out", width, 4 * width, 1, side),
            ]
            if block == 0:
                layers.append(_conv(f"{name}, shortcut", channels, 4 * width, 1, side))
            channels = 4 * width
    return [*layers, Layer("classifier", 2048 * 1000 + 1000, 2048 * 1000)]


def _conv(name: str, inputs: int, outputs: int, kernel: int, side: int) -> Layer:
    weights = inputs * outputs * kernel**2
    return Layer(name, weights + 2 * outputs, weights * side**2)


def bert_large() -> list[Layer]:
    """The layers of BERT-large without a head, four to a block.

    Source: Devlin et al. 2018 (arXiv 1810.04805), section 3: 24 blocks, width 1024, 30522 word pieces.
    """
    width = 1024
    # A look-up multiplies nothing. Its gradient is there last of all.
    layers = [Layer("embeddings", (30522 + 512 + 2 + 2) * width, 0)]
    for block in range(24):
        for name, inputs, outputs in (
            ("queries, keys, values", width, 3 * width),
            ("attention's output", width, width),
            ("wider", width, 4 * width),
            ("narrower", 4 * width, width),
        ):
            norm = 2 * width if outputs == width else 0
            layers.append(Layer(f"block {block}, {name}", inputs * outputs + outputs + norm, inputs * outputs))
    return layers


NETWORKS = {"ResNet-50": (resnet50(), 0.097), "BERT": (bert_large(), 7 / 7.56)}  # seconds of a step on one GPU


def profile_of(network: str) -> Profile:
    """Return the step of one GPU, its times shared out among the layers as ASSUMPTIONS say."""
    layers, step_s = NETWORKS[network]
    params = sum(layer.params for layer in layers)
    optimizer_s = 3 * 4 * params / MEMORY_BYTES_PER_S
    forward_s = (step_s - optimizer_s) / 3
    backward_s = 2 * forward_s
    gradients = tuple(
        Gradient(layer.name, 4 * layer.params, backward_s * share)
        for layer, share in zip(reversed(layers), _done(reversed(layers)), strict=True)
    )
    return Profile(forward_s, gradients, backward_s, optimizer_s)


def _done(layers: Iterable[Layer]) -> Iterator[float]:
    """Which part of all work is done after each layer."""
    layers = list(layers)
    whole, done = sum(layer.work for layer in layers), 0.0
    for layer in layers:
        done += layer.work
        yield done / whole


# --- Beside the paper ------------------------------------------------------------------------------


def savings() -> list[Saving]:
    """What overlap saves on 32 GPUs, for both networks and both backends."""
    found = []
    for (network, backend), published in PUBLISHED_SAVINGS.items():
        profile, link = profile_of(network), BACKENDS[backend]
        prediction = predict(profile, CAP_BYTES, GPUS, link)
        most, needed = _matching(profile, published, link)
        found.append(Saving(network, backend, published, saved(prediction), prediction, most, needed))
    return found


def saved(prediction: Prediction) -> float:
    """Return the part by which overlap shortens the step."""
    return prediction.hidden_s / (prediction.step_s + prediction.hidden_s)


def _matching(profile: Profile, published: float, link: Link) -> tuple[float, float | None]:
    """Return the largest saving of any bandwidth, and the bandwidth nearest to the link's with the published one."""
    rates = [link.bytes_per_s * 10 ** (step / 100) for step in range(-200, 201)]  # from a hundredth to a hundredfold
    by_rate = {rate: saved(predict(profile, CAP_BYTES, GPUS, Link("any", link.latency_s, rate))) for rate in rates}
    pairs = zip(rates, rates[1:], strict=False)
    crossings = [a for a, b in pairs if (by_rate[a] - published) * (by_rate[b] - published) <= 0]
    nearest = min(crossings, key=lambda rate: abs(rates.index(rate) - 200), default=None)
    return max(by_rate.values()), nearest


def slowdown(network: str, world_size: int) -> float:
    """Return how many times as long as on one GPU a step is predicted to take with NCCL."""
    profile = profile_of(network)
    alone = predict(profile, CAP_BYTES, 1, BACKENDS["NCCL"]).step_s
    return predict(profile, CAP_BYTES, world_size, BACKENDS["NCCL"]).step_s / alone


def report() -> str:
    """Return the comparison as text: savings, scaling, every assumption, and what the differences say."""
    lines = ["What overlap saves on 32 GPUs, in % of the step without it (all links simulated)"]
    lines.append(
        "network    backend  published  predicted  most possible  bandwidth that would give the published figure"
    )
    for row in savings():
        needed = row.bytes_per_s_for_published
        lines.append(
            f"{row.network:<11}{row.backend:<9}{100 * row.published:>9.1f}{100 * row.predicted:>11.1f}"
            f"{100 * row.most:>15.1f}  {f'{needed / 1e9:.1f} GB/s' if needed else 'none'}, "
            f"assumed {BACKENDS[row.backend].bytes_per_s / 1e9:.1f} GB/s"
        )
    lines += ["", "A step of ResNet-50 with NCCL, in ms; without DDP 97", "GPUs  published  predicted"]
    alone_s = NETWORKS["ResNet-50"][1]
    for gpus, published_s in PUBLISHED_STEPS_S.items():
        lines.append(f"{gpus:>4}{1000 * published_s:>11.0f}{1000 * alone_s * slowdown('ResNet-50', gpus):>11.1f}")
    lines += ["", "A step on so many GPUs, in steps on one; published for 256: about 2", "GPUs  ResNet-50   BERT"]
    for gpus in (1, 8, 32, 64, 128, 256, 1024):
        lines.append(f"{gpus:>4}{slowdown('ResNet-50', gpus):>11.2f}{slowdown('BERT', gpus):>7.2f}")
    lines += ["", "Assumed", *(f"- {one.what}: {one.value} ({one.why})" for one in ASSUMPTIONS), "", DISCUSSION]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
