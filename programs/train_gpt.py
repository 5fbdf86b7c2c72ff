"""Train a GPT, on one rank or on many.

    torchrun --standalone --nproc-per-node 2 train_gpt.py --steps 200

It continues on any ranks that see its checkpoint, if they divide --batch / --micro.
"""

import argparse
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, adamw, learning_rate
from gpt_text import numbers_of_step, read_text, windows
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()  # batch: windows of all ranks; micro: of one pass
for name, default in {"batch": 32, "micro": 8, "context": 64, "steps": 200}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--until", type=int, help="stop earlier: a job's time is limited")
parser.add_argument("--bf16", action="store_true", help="matmuls in bfloat16")
parser.add_argument("--compile", action="store_true", help="fuse operations")
parser.add_argument("--checkpoint", default="gpt.pt")


@torch.no_grad()
def held_out_loss(model, tokens, context, device):
    """Mean over 128 windows of the text: each rank sums its own, then all ranks do."""
    sums = torch.zeros(2, device=device)
    every = (len(tokens) - 1) // context // 128  # 128 windows, evenly spread
    mine = torch.arange(dist.get_rank(), 128, dist.get_world_size()) * every
    for numbers in mine.split(32):
        x, y = (part.to(device) for part in windows(tokens, numbers, context))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        sums += torch.stack([loss, loss.new_tensor(y.numel())])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main(options):
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # else CPU
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what stays float32
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if options.batch % (world_size * options.micro):
        raise SystemExit("--batch must be a multiple of --micro times the ranks")
    torch.manual_seed(0)
    model = GPT(context=options.context).to(device)
    optimizer = adamw(model)
    first, log, shape = 0, [], [options.batch, options.context]
    found = [os.path.exists(options.checkpoint)]
    dist.broadcast_object_list(found, src=0)  # rank 0 decides for all ranks
    if found[0]:
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, log = saved["step"], saved["log"]
        if saved["shape"] != shape:
            raise SystemExit("--batch and --context must be those of the checkpoint")
    if options.compile:
        model.compile()  # in place: the names of the parameters stay
    replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    train, held_out = read_text()
    count, until = (len(train) - 1) // options.context, options.until or options.steps
    start, since = first, time.perf_counter()
    for step in range(first, until):
        mine = numbers_of_step(count, step, options.batch)[rank::world_size]
        parts, total = mine.split(options.micro), torch.zeros((), device=device)
        for part in parts:  # the micro-batches; DDP averages in the last one
            x, y = (half.to(device) for half in windows(train, part, options.context))
            with nullcontext() if part is parts[-1] else replica.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
                    logits = replica(x).flatten(0, 1)
                loss = F.cross_entropy(logits.float(), y.flatten()) / len(parts)
                loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the mean
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if done % 10 == 0 or done == until:
            dist.all_reduce(total)  # else it is the loss of this rank's windows only
            loss, seconds = total.item() / world_size, time.perf_counter() - since
            speed = (done - start) * options.batch * options.context / seconds
            outside = held_out_loss(model, held_out, options.context, device)
            log.append((done, loss, outside, speed))
            if rank == 0:
                print(f"step {done}: loss {loss:.4f}, held-out {outside:.4f}, ", end="")
                print(f"gradient norm {norm:.2f}, {speed:,.0f} tokens/s")
                saved = {"model": model.state_dict(), "log": log, "shape": shape}
                saved |= {"optimizer": optimizer.state_dict(), "step": done}
                torch.save(saved, options.checkpoint + ".new")
                os.replace(options.checkpoint + ".new", options.checkpoint)  # atomic
            start, since = done, time.perf_counter()
    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parser.parse_args())
