"""Every picture of the course. `style.py` holds the look, the other files the pictures."""

from ddp_course.draw.membership import rank_map, rendezvous, subgroups
from ddp_course.draw.metrics import mean_weights, own_losses, sums_and_counts
from ddp_course.draw.processes import all_reduce, collective_calls, processes
from ddp_course.draw.style import rank_colour, text_problems, texts_of
from ddp_course.draw.training import data_parallel_step, losses, shards

__all__ = [
    "all_reduce",
    "collective_calls",
    "data_parallel_step",
    "losses",
    "mean_weights",
    "own_losses",
    "processes",
    "rank_colour",
    "rank_map",
    "rendezvous",
    "shards",
    "subgroups",
    "sums_and_counts",
    "text_problems",
    "texts_of",
]
