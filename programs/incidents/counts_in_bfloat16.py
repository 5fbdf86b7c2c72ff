"""A counter is a floating-point buffer, and the model is cast to bfloat16.

Seen: the router's correction goes in the wrong direction, and runs that should be equal part.
Found: compare the counters with a count in integers beside them: they differ by the rounding of bfloat16.
Cure: count in integers: `.to(torch.bfloat16)` converts floating-point buffers only.
Met at: NVIDIA/Megatron-LM#7081
"""

import torch
import torch.distributed as dist
from torch import nn

STEPS, TOKENS = 10, 600


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        counts = torch.zeros(4)  # cure: counts = torch.zeros(4).long()
        self.register_buffer("tokens_per_expert", counts)

    def forward(self, x):
        expert = self.gate(x).argmax(-1)
        self.tokens_per_expert += expert.bincount(minlength=4)
        return expert


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
router = Router().to(torch.bfloat16)
torch.manual_seed(rank)
routed = torch.zeros(4).long()
for _ in range(STEPS):
    expert = router(torch.randn(TOKENS, 16, dtype=torch.bfloat16))
    routed += expert.bincount(minlength=4)
counted = router.tokens_per_expert
dist.all_reduce(counted)
dist.all_reduce(routed)

dist.destroy_process_group()
report = f"{routed.tolist()} tokens were routed, {counted.tolist()} counted"
assert counted.tolist() == routed.tolist(), report
if rank == 0:
    print(report)
