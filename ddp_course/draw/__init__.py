"""Every picture of the course: a function takes the data that it shows and returns a matplotlib `Figure`.

`style.py` holds the look, `shapes.py` and `charts.py` what pictures are made of, the other files the pictures.
"""

from ddp_course.draw.beyond import holdings, live_bytes, pipeline_passes
from ddp_course.draw.buckets import bucket_plan, size_text
from ddp_course.draw.checkpointing import landings, resume_differences, write_kills
from ddp_course.draw.collectives import collective, message_rounds, ring_steps
from ddp_course.draw.data_parallel import shard_gradients, stacked
from ddp_course.draw.failures import hang
from ddp_course.draw.games import players
from ddp_course.draw.language import accumulation_step, dealt_windows, gpt_block
from ddp_course.draw.levers import lever
from ddp_course.draw.membership import rank_map, rendezvous, subgroups
from ddp_course.draw.metrics import mean_weights, own_losses, sums_and_counts
from ddp_course.draw.moving import bucket_sizes, gpu_memory
from ddp_course.draw.ranks import all_reduce, collective_calls
from ddp_course.draw.recovery import agents, killed_run, lost_time, sigterm
from ddp_course.draw.replays import Replay, replay
from ddp_course.draw.replicas import conditions
from ddp_course.draw.sampling import dealt
from ddp_course.draw.sharding import gathered_layers, owners
from ddp_course.draw.statistics import backward_sums
from ddp_course.draw.style import rank_colour
from ddp_course.draw.timelines import timeline
from ddp_course.draw.training import data_parallel_step, shards
from ddp_course.draw.words import described

__all__ = [
    "Replay",
    "accumulation_step",
    "agents",
    "all_reduce",
    "backward_sums",
    "bucket_plan",
    "bucket_sizes",
    "collective",
    "collective_calls",
    "conditions",
    "data_parallel_step",
    "dealt",
    "dealt_windows",
    "described",
    "gathered_layers",
    "gpt_block",
    "gpu_memory",
    "hang",
    "holdings",
    "killed_run",
    "landings",
    "lever",
    "live_bytes",
    "lost_time",
    "mean_weights",
    "message_rounds",
    "own_losses",
    "owners",
    "pipeline_passes",
    "players",
    "rank_colour",
    "rank_map",
    "rendezvous",
    "replay",
    "resume_differences",
    "ring_steps",
    "shard_gradients",
    "shards",
    "sigterm",
    "size_text",
    "stacked",
    "subgroups",
    "sums_and_counts",
    "timeline",
    "write_kills",
]
