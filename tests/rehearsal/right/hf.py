import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass
class TrainingArguments:
    num_train_epochs: int = 2
    global_batch_size: int = 32
    learning_rate: float = 5e-3
    logging_steps: int = 4
    seed: int = 42

    @property
    def process_index(self):
        return int(os.environ.get("RANK", 0))

    @property
    def n_procs(self):
        return int(os.environ.get("WORLD_SIZE", 1))

    @property
    def is_world_process_zero(self):
        return self.process_index == 0


class PrinterCallback:
    def on_log(self, args, logs):
        if args.is_world_process_zero:
            print(logs)


class Trainer:
    def __init__(self, model, args, train_dataset, callbacks):
        self.args, self.callbacks = args, callbacks
        self.train_dataset = train_dataset
        self.device = torch.device("cpu")
        self.model = model.to(self.device)
        self.model_wrapped = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)

    def get_train_dataloader(self):
        sampler = torch.utils.data.DistributedSampler(
            self.train_dataset, num_replicas=self.args.n_procs, rank=self.args.process_index, seed=self.args.seed
        )
        return torch.utils.data.DataLoader(
            self.train_dataset,
            batch_size=self.args.global_batch_size // self.args.n_procs,
            sampler=sampler,
            drop_last=True,
        )

    def _nested_mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return (value / self.args.n_procs).item()

    def training_step(self, inputs):
        self.model_wrapped.train()
        out = self.model_wrapped(inputs["x"])
        loss = nn.functional.mse_loss(out, inputs["y"])
        loss.backward()
        return loss.detach()

    def train(self):
        loader = self.get_train_dataloader()
        step = 0
        for epoch in range(self.args.num_train_epochs):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                loss = self.training_step({"x": x, "y": y})
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                if step % self.args.logging_steps == 0:
                    logs = {"loss": self._nested_mean(loss), "epoch": epoch}
                    for cb in self.callbacks:
                        cb.on_log(self.args, logs)


def main():
    args = TrainingArguments()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    x = torch.randn(256, 4)
    ds = torch.utils.data.TensorDataset(x, x @ torch.ones(4, 1))
    Trainer(nn.Linear(4, 1), args, ds, [PrinterCallback()]).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
