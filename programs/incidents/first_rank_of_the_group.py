"""The source of a broadcast within a group is counted in the group, torch counts in the world.

Seen: it works on one node; on two, the second node's ranks fail as soon as they share a value among themselves.
Found: print the global ranks of the group: `dist.get_process_group_ranks(group)` has no 0 on the second node.
Cure: `src` is a global rank: `dist.get_global_rank(group, 0)`, or pass `group_src=0`.
Met at: meta-pytorch/torchrec#4601
Ranks: 4
"""

import torch.distributed as dist

NODE = 2  # ranks of a node

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
nodes = [dist.new_group([first, first + 1]) for first in range(0, world_size, NODE)]
group = nodes[rank // NODE]

plan = [None]
if dist.get_rank(group) == 0:  # the group's first rank makes the plan
    plan = [f"plan of rank {rank}"]
leader = 0  # cure: leader = dist.get_global_rank(group, 0)
dist.broadcast_object_list(plan, src=leader, group=group)

dist.barrier(group)
if rank == world_size - 1:
    print(f"rank {rank} has the {plan[0]}")
dist.destroy_process_group()
