"""Only the ranks that find no cache file reach the barrier.

Seen: the first start hangs in the import, with an empty cache; later starts do not.
Found: print on every rank, just before the `if`, whether the file is there: the ranks disagree.
Cure: take the barrier out of the `if`: what a rank finds on disk must not decide whether it communicates.
Met at: unslothai/unsloth-zoo#967
"""

import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank = dist.get_rank()
names = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(names, src=0)
cache = Path(names[0]) / "compiled.txt"
try:
    time.sleep(rank)  # the other ranks import for longer
    if not cache.exists():
        if rank == 0:
            cache.write_text("compiled\n")
        dist.barrier()  # cure:
    # cure: dist.barrier()
    text = cache.read_text().strip()
    gradient = torch.ones(4)
    dist.all_reduce(gradient)
finally:
    shutil.rmtree(cache.parent, ignore_errors=True)
if rank == 0:
    print(f"read {text!r}, reduced {gradient.tolist()}")
dist.destroy_process_group()
