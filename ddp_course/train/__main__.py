"""A rank of a job, or the job itself: `torchrun --nproc-per-node 2 -m ddp_course.train [gpt|policy]`."""

import os
import sys

from ddp_course.cli import any_locale
from ddp_course.commands.train import main

if __name__ == "__main__":
    any_locale()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # in the interpreter's own teardown, DDP's last threads may abort the process
