"""Learn CartPole by PPO, on one rank or on many: each rank plays games of its own.

    torchrun --standalone --nproc-per-node 2 train_policy.py

So small a network stays on the CPU, where the games are.
"""

import numpy as np
import torch
import torch.distributed as dist
from cartpole import ActorCritic, advantages, evaluate, log_prob, play
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GAMES, STEPS, TURNS, PASSES = 8, 32, 80, 16  # games of each rank
CLIP, RATE, RUN = 0.2, 2e-3, 0  # RUN is the seed


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(RUN)
    torch.set_num_threads(1)
    model = ActorCritic()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=1e-5)  # usual in PPO
    returns = []  # of this rank's episodes that ended
    seeds = np.random.SeedSequence((RUN, rank)).generate_state(2).tolist()
    turns = play(model, GAMES, STEPS, seeds, returns)
    for turn in range(TURNS):
        # Play. came: reward, terminated, truncated.
        state, action, old, value, *came, plays, last = next(turns)
        advantage = advantages(value, last, *came)
        # Leave out the steps that no policy played.
        columns = state, action, old, advantage, advantage + value
        state, action, old, advantage, target = (one[plays] for one in columns)
        # Shift and scale the advantages, by the samples of all ranks.
        count = torch.tensor(len(action))
        sums = torch.stack([count, advantage.sum(), advantage.square().sum()]).double()
        dist.all_reduce(sums)
        mean, squares = sums[1:] / sums[0]
        advantage = (advantage - mean) / (squares - mean**2).sqrt()
        share = world_size / sums[0].item()  # DDP divides by ranks, not by samples
        left = 1 - turn / TURNS  # falls towards 0: the last turns change little
        clip, optimizer.param_groups[0]["lr"] = CLIP * left, RATE * left
        for _ in range(PASSES):  # learn
            logit, value = replica(state)
            ratio = (log_prob(logit, action) - old).exp()
            clipped = ratio.clamp(1 - clip, 1 + clip)
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            critic = 0.5 * (value - target).square()  # 0.5: its weight in the loss
            loss = share * (critic - gain).sum()
            optimizer.zero_grad()
            loss.backward()
            # After DDP's average, so all ranks find the same norm.
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if (turn + 1) % 10 == 0:
            found = evaluate(model, 64, rank, world_size)
            if rank == 0:
                print(f"turn {turn + 1}: mean return {found:.1f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
