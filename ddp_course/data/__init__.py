"""What does each rank train on?"""

from ddp_course.data.datasets import DATASETS, Images, load
from ddp_course.data.downloads import DatasetError

__all__ = ["DATASETS", "DatasetError", "Images", "load"]
