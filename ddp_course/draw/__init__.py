"""Every picture of the course: a function takes the data that it shows and returns a matplotlib `Figure`.

`style.py` holds the look, `shapes.py` and `charts.py` what pictures are made of, the other files the pictures.
"""

from ddp_course.draw.beyond import decision, holdings, live_bytes, memory_bars, pipeline_passes
from ddp_course.draw.buckets import bucket_plan, bucket_sweep, size_text
from ddp_course.draw.checkpointing import landings, resume_differences, write_kills
from ddp_course.draw.collectives import collective, message_rounds, ring_steps
from ddp_course.draw.data_parallel import gradient_noise, loss_curves, quantities, shard_gradients, stacked
from ddp_course.draw.end_to_end import (
    changed_images,
    class_accuracies,
    distances,
    learning_curves,
    learning_rates,
    number_formats,
)
from ddp_course.draw.failures import hang, lateness
from ddp_course.draw.games import cart_poses, episode_ends, players, return_bands, return_curves, seed_table
from ddp_course.draw.language import accumulation_step, dealt_windows, gpt_block
from ddp_course.draw.levers import lever, many_ranks, valley
from ddp_course.draw.membership import rank_map, rendezvous, subgroups
from ddp_course.draw.metrics import mean_weights, own_losses, printed_losses, sums_and_counts
from ddp_course.draw.ranks import all_reduce, collective_calls
from ddp_course.draw.readable import text_problems, texts_of
from ddp_course.draw.recovery import agents, killed_run, lost_time
from ddp_course.draw.replays import Replay, replay
from ddp_course.draw.replicas import conditions
from ddp_course.draw.sampling import dealt
from ddp_course.draw.scaling import collective_fit, step_split
from ddp_course.draw.sharding import gathered_layers
from ddp_course.draw.statistics import backward_sums, combined_statistics, statistics_noise
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
    "bucket_sweep",
    "cart_poses",
    "changed_images",
    "class_accuracies",
    "collective",
    "collective_calls",
    "collective_fit",
    "combined_statistics",
    "conditions",
    "data_parallel_step",
    "dealt",
    "dealt_windows",
    "decision",
    "described",
    "distances",
    "episode_ends",
    "gathered_layers",
    "gpt_block",
    "gradient_noise",
    "hang",
    "holdings",
    "killed_run",
    "landings",
    "lateness",
    "learning_curves",
    "learning_rates",
    "lever",
    "live_bytes",
    "loss_curves",
    "lost_time",
    "many_ranks",
    "mean_weights",
    "memory_bars",
    "message_rounds",
    "number_formats",
    "own_losses",
    "pipeline_passes",
    "players",
    "printed_losses",
    "quantities",
    "rank_colour",
    "rank_map",
    "rendezvous",
    "replay",
    "resume_differences",
    "return_bands",
    "return_curves",
    "ring_steps",
    "seed_table",
    "shard_gradients",
    "shards",
    "size_text",
    "stacked",
    "statistics_noise",
    "step_split",
    "subgroups",
    "sums_and_counts",
    "text_problems",
    "texts_of",
    "timeline",
    "valley",
    "write_kills",
]
