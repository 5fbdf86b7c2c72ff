"""How do replicas stay equal?"""

from ddp_course.parallel.bucketing import Bucket, plan_buckets
from ddp_course.parallel.ddp import BucketedDDP
from ddp_course.parallel.grad_bucket import GradBucket
from ddp_course.parallel.naive import NaiveDDP, average_gradients, average_gradients_flat
from ddp_course.parallel.replicas import broadcast_buffers, broadcast_module, check_same_model
from ddp_course.parallel.syncbn import SyncBatchNorm

__all__ = [
    "Bucket",
    "BucketedDDP",
    "GradBucket",
    "NaiveDDP",
    "SyncBatchNorm",
    "average_gradients",
    "average_gradients_flat",
    "broadcast_buffers",
    "broadcast_module",
    "check_same_model",
    "plan_buckets",
]
