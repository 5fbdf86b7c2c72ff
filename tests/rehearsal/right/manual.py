import torch
import torch.distributed as dist

# data parallel by hand, no DDP
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Sigmoid(), torch.nn.Linear(10, 1))
for p in model.parameters():
    dist.broadcast(p.data, 0)


def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


X = torch.randn(400, 10)
Y = X.prod(1, keepdim=True)
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
for epoch in range(2):
    perm = torch.randperm(400, generator=torch.Generator().manual_seed(epoch))
    epoch_loss = torch.zeros(())
    for chunk in perm.view(-1, 40):
        mine = chunk[rank::size]
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(X[mine]), Y[mine])
        loss.backward()
        average_gradients(model)
        opt.step()
        epoch_loss += loss.detach() * len(mine)
    dist.all_reduce(epoch_loss)
    if rank == 0:
        print(f"Rank {rank}, epoch {epoch}: {epoch_loss.item() / 400}")
dist.barrier()
