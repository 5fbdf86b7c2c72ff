"""A model in GPT-2's shape, its optimizer and its schedule; for `train_gpt.py`.

Shapes: N windows, T tokens of a window, D width of the residual stream, H heads.
In q, k and v, D is the width of one head.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


def attend(q_NHTD, k_NHTD, v_NHTD):
    """Mean of the values so far, weighted by how well each key fits the query."""
    return F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, is_causal=True)


class Block(nn.Module):
    """Attention, then an MLP; each reads the residual stream and adds to it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_NTD):
        qkv = self.qkv(self.norm_1(x_NTD)).chunk(3, dim=-1)
        # From (N, T, D) to (N, H, T, D / H): each head attends for itself.
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        x_NTD = x_NTD + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        hidden = F.gelu(self.up(self.norm_2(x_NTD)), approximate="tanh")
        return x_NTD + self.down(hidden)


class GPT(nn.Module):
    """Return the logits of the next token at each position, (N, T, vocabulary)."""

    def __init__(self, layers=3, heads=3, width=96, context=64, vocabulary=256):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each block adds twice, so a smaller start keeps the sum's size.
                last = name.endswith(("out.weight", "down.weight"))
                scale = (2 * layers) ** -0.5 if last else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens_NT):
        x_NTD = self.tokens(tokens_NT) + self.positions.weight[: tokens_NT.shape[1]]
        for block in self.blocks:
            x_NTD = block(x_NTD)
        return F.linear(self.norm(x_NTD), self.tokens.weight)  # the same matrix again


def adamw(model):
    """Weight decay for matrices, embeddings too; LayerNorm's weights belong near 1."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def learning_rate(step, steps, highest=3e-3):
    """Rise over a tenth of the steps, then fall to a tenth along a cosine."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return highest * ((step + 1) / warmup)
    falling = 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))
    return highest * falling
