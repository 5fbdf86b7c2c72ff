"""A resumed run trains on its epoch from the first batch again, and goes on counting from the saved step.

Seen: after each restart the step counter is further ahead of the epochs, and the learning rate reaches 0 too early.
Found: compare the number of steps at the end with epochs times batches.
Cure: skip the batches of the epoch that the saved step has counted already.
Met at: NguyenJus/custom-sam-peft#308
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, ROWS = 3, 48

dist.init_process_group("gloo")


def train(saved=None, stop_at=None):
    torch.manual_seed(0)
    sampler = DistributedSampler(rows := torch.randn(ROWS, 3))
    loader = DataLoader(rows, batch_size=6, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = LinearLR(optimizer, 1.0, 0.0, EPOCHS * len(loader))
    step, first_epoch = 0, 0
    if saved:
        step, first_epoch = saved["step"], saved["epoch"]
        schedule.load_state_dict(saved["schedule"])
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        # cure: for _ in range(step - epoch * len(loader)):
        # cure:     next(batches)
        for x in batches:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            if step == stop_at:
                state = schedule.state_dict()
                return {"step": step, "epoch": epoch, "schedule": state}
    return {"step": step, "planned": EPOCHS * len(loader)}


ended = train(train(stop_at=12))
said = f"{ended['step']} steps were counted, {ended['planned']} are planned"
assert ended["step"] == ended["planned"], said
if dist.get_rank() == 0:
    print(said)
dist.destroy_process_group()
