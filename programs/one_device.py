"""Train a small network on one device: an ordinary program that knows nothing of ranks.

    python one_device.py
    python one_device.py --epochs 8 --checkpoint run.pt     # typed again, it resumes

`diff one_device.py ddp.py` shows all that changes for several devices.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

BATCH = 64


def make_data(samples, seed):
    """Points of a plane in two classes, inside and outside of a ring."""
    points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.norm(dim=1) < 1.2).long())


def make_model():
    torch.manual_seed(0)
    hidden = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 2))


def evaluate(model, data, device):
    """Return the share of samples that the model gets right."""
    found = torch.zeros(2, device=device)
    for x, y in DataLoader(data, batch_size=256):
        found[0] += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        found[1] += len(x)
    return (found[0] / found[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train, test = make_data(2048, seed=1), make_data(1001, seed=2)
    order = torch.Generator()
    sampler = RandomSampler(train, generator=order)
    loader = DataLoader(train, BATCH, sampler=sampler)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    first = 0
    if options.checkpoint and os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]

    for epoch in range(first, options.epochs):
        order.manual_seed(epoch)
        total = torch.zeros((), device=device)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(x)
        model.eval()
        with torch.no_grad():
            accuracy = evaluate(model, test, device)
        mean = total.item() / len(train)
        print(f"epoch {epoch}: loss {mean:.4f}, accuracy {accuracy:.4f}")
        if options.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["epoch"] = epoch + 1
            torch.save(state, options.checkpoint + ".part")
            os.replace(options.checkpoint + ".part", options.checkpoint)


if __name__ == "__main__":
    main()
