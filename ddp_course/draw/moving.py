"""What changes when one moves a slider? Two pictures: the size of a bucket, and the number of GPUs.

Every frame is drawn beforehand, from numbers of the course's own `predict` and `memory_of`; the slider chooses one. The
HTML needs nothing else, and is stored in the notebook. Where scripts are off, the first frame is shown.

Read next: `replays.py`, which steps through what really happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ddp_course.beyond.activations import transformer
from ddp_course.beyond.memory import Strategy, memory_of
from ddp_course.draw.style import ALARM, rank_colour
from ddp_course.scaling.link import Link
from ddp_course.scaling.simulate import Gradient, Prediction, Profile, predict

MIB, WIDE, HIGH, LEFT = 2**20, 640, 26, 96  # pixels of a picture, of a bar, and of the room for names
LAYERS, LAYER_S = 8, 0.020  # lesson 07's model: a layer's weight and bias, and what its backward takes
CAPS = (0, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB)  # bytes at which a bucket closes; 0 is one bucket for each gradient
RANKS, LINK = 2, Link("50 MB/s", 0.004, 50e6)  # lesson 07's slow link: 8 ms for an all-reduce, and its bytes
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)
STRATEGIES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP": 3}  # and what is divided
GPU = 80e9  # bytes
COLOURS = {"backward": rank_colour(0), "all-reduce": ALARM}
Bar = tuple[float, float, str, str]  # from and to, as shares of the picture's width; colour; what it is


def profile() -> Profile:
    """Return lesson 07's step: eight layers of 512 by 512, the last one's gradients first."""
    gradients = []
    for number, layer in enumerate(reversed(range(LAYERS)), 1):
        at = number * LAYER_S
        gradients += [Gradient(f"{layer}.bias", 4 * 512, at), Gradient(f"{layer}.weight", 4 * 512 * 512, at)]
    return Profile(0.0, tuple(gradients), LAYERS * LAYER_S, 0.0)


def steps() -> dict[int, Prediction]:
    """Predict the step for each cap."""
    return {cap: predict(profile(), cap, RANKS, LINK, first_cap_bytes=cap) for cap in CAPS}


def bucket_sizes() -> Moving:
    """A step of lesson 07's model over its slow link: a slider over the size of a bucket."""
    found = steps()
    longest, frames = max(each.step_s for each in found.values()), []
    for cap, step in found.items():
        rows: dict[str, list[Bar]] = {"model": [], "link": []}
        sent = [span for span in step.spans if span.lane == "all-reduce"]
        for span in (each for each in step.spans if each.lane in COLOURS):
            says = f"{span.lane}, {span.end_s - span.start_s:.3f} s"
            bar = (span.start_s / longest, span.end_s / longest, COLOURS[span.lane], says)
            rows["link" if span in sent else "model"].append(bar)
        size = f"a bucket closes at {cap // MIB} MiB" if cap else "each gradient is a bucket"
        count = f"{len(sent)} all-reduce{'s' * (len(sent) > 1)}"
        words = f"{size}: {count}, a step of {step.step_s:.3f} s, {step.exposed_s:.3f} s of it exposed"
        frames.append((words, rows))
    return Moving("bucket size", COLOURS, frames)


def memories() -> dict[int, dict[str, dict[str, float]]]:
    """Return the bytes of each part, by number of GPUs and strategy: 7 billion parameters, AdamW, mixed precision."""
    units = transformer(layers=32, hidden=4096, sequence=2048, rows=1, vocabulary=32_000)
    return {
        world_size: {
            name: memory_of(units, Strategy(data=world_size, divided=divided), "master").parts()
            for name, divided in STRATEGIES.items()
        }
        for world_size in WORLD_SIZES
    }


def gpu_memory() -> Moving:
    """What each GPU holds of a GPT of 6.6 billion parameters: a slider over the number of GPUs."""
    found = memories()
    most, frames = max(sum(parts.values()) for held in found.values() for parts in held.values()), []
    for world_size, held in found.items():
        rows: dict[str, list[Bar]] = {}
        for name, parts in held.items():
            at, rows[name] = 0.0, []
            for number, (part, size) in enumerate(parts.items()):
                rows[name].append((at / most, (at + size) / most, rank_colour(number), f"{part}, {size / 1e9:.1f} GB"))
                at += size
        totals = {name: sum(parts.values()) for name, parts in held.items()}
        sizes = ", ".join(f"{name} {size / 1e9:.0f} GB" for name, size in totals.items())
        fits = [name for name, size in totals.items() if size <= GPU]
        words = f"{world_size} GPU{'s' * (world_size > 1)}: {sizes}; what fits into 80 GB: "
        frames.append((words + (", ".join(fits) or "nothing"), rows))
    parts = next(iter(found[1].values()))
    return Moving("number of GPUs", {part: rank_colour(number) for number, part in enumerate(parts)}, frames)


@dataclass(frozen=True)
class Moving:
    """A slider, what the colours mean, and for each of its places what is said there and the bars of each row."""

    name: str
    colours: dict[str, str]
    frames: list[tuple[str, dict[str, list[Bar]]]]

    def __repr__(self) -> str:
        return "\n".join(said for said, _ in self.frames)

    def _repr_html_(self) -> str:
        shown = [_frame(rows, hidden=number > 0) for number, (_, rows) in enumerate(self.frames)]
        words = [f"<p{' hidden' * (number > 0)}>{escape(said)}</p>" for number, (said, _) in enumerate(self.frames)]
        choose = "for (const kind of ['svg', 'p']) this.closest('figure').querySelectorAll(kind)"
        choose += ".forEach((each, n) => each.toggleAttribute('hidden', n != this.value))"
        most = len(self.frames) - 1
        field = f'<input type="range" min="0" max="{most}" value="0" oninput="{choose}" style="width: 20em">'
        marks = [f'<span style="color: {colour}">■</span> {escape(part)}' for part, colour in self.colours.items()]
        lines = [
            f'<figure class="moving"><label>{escape(self.name)} {field}</label>',
            f"<div>{' &ensp; '.join(marks)}</div>",
        ]
        return "\n".join([*lines, *shown, *words, "</figure>\n"])


def _frame(rows: dict[str, list[Bar]], hidden: bool) -> str:
    high = HIGH * len(rows)
    lines = [f'<svg viewBox="0 0 {LEFT + WIDE} {high}" role="img"{" hidden" * hidden}>']
    for place, (name, bars) in enumerate(rows.items()):
        top = place * HIGH + 3
        lines.append(f'<text x="0" y="{top + 14}" font-size="13" fill="currentColor">{escape(name)}</text>')
        for start, end, colour, says in bars:
            box = f'x="{LEFT + start * WIDE:.1f}" y="{top}" width="{(end - start) * WIDE:.1f}" height="{HIGH - 6}"'
            lines.append(f'<rect {box} fill="{colour}" stroke="white"><title>{escape(says)}</title></rect>')
    return "".join([*lines, "</svg>"])
