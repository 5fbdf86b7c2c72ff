"""Train a small network on handwritten digits in one process, on all GPUs it sees.

python train_dp.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
digits = TensorDataset(x, y)
order = torch.Generator()
sampler = RandomSampler(digits, generator=order)  # all images
loader = DataLoader(digits, 32, sampler=sampler)
torch.manual_seed(0)  # the same first weights in every run
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
replica = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

for epoch in range(5):
    order.manual_seed(epoch)  # a different order in each epoch
    total = torch.zeros((), device=device)
    for x, y in loader:
        loss = nn.functional.cross_entropy(replica(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()  # computes the gradients, and adds them up on the first GPU
        optimizer.step()
        total += loss.detach() * len(x)
    print(f"epoch {epoch}: loss {total.item() / len(digits):.4f}")
