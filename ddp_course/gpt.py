"""What is a GPT-2-shaped model, and what in it concerns data parallel training?

Tokens become vectors, by a table of embeddings and a table of positions. A stack of blocks changes them: in each,
every position looks at those before it (attention), then is changed on its own (two linear layers). The last layer
compares each vector with every embedding: the output uses the same matrix as the input. That matrix is *tied*: one
parameter, used twice, so it gets one gradient, the sum of both uses, and DDP must wait for the second one.

`SIZES` go from a model that learns on a laptop to the 124 million parameters of GPT-2 itself.

Left out on purpose: dropout, which GPT-2's paper uses and which a model that never sees a text twice does not need;
and a cache of keys and values for `generate`, which then computes each position again for each new token.
Read next: `programs/train_gpt.py`; torch/nn/functional.py, `scaled_dot_product_attention`.

Shapes: N rows, T tokens in a row, D width, H heads, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "SIZES", "GPTShape", "flops_per_token", "generate", "weight_decay_groups"]

STD = 0.02  # of the first weights
POSITION_STD = 0.01


@dataclass(frozen=True)
class GPTShape:
    """The numbers that make one GPT differ from another."""

    layers: int
    heads: int
    width: int  # D, a multiple of the heads
    context: int  # T, the most tokens that the model can look at
    vocabulary: int = 256  # V; 256 is one token for each byte

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} cannot be divided among heads={self.heads}; choose a multiple")


SIZES = {
    "tiny": GPTShape(layers=2, heads=2, width=32, context=32),  # for tests
    "mini": GPTShape(layers=4, heads=4, width=128, context=64),  # learns Python's looks on two cores
    "small": GPTShape(layers=6, heads=6, width=384, context=256),
    "gpt2": GPTShape(layers=12, heads=12, width=768, context=1024, vocabulary=50257),
}


class Attention(nn.Module):
    """Each position takes from those before it, and from itself, what it looks for; several heads side by side."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x_NTD: torch.Tensor) -> torch.Tensor:
        three = self.query_key_value(x_NTD).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in three)  # (N, H, T, D/H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # nobody looks ahead
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linear layers; each takes the normalised stream, and adds what it found to the stream."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x_NTD: torch.Tensor) -> torch.Tensor:
        x_NTD = x_NTD + self.attention(self.attention_norm(x_NTD))
        return x_NTD + self.down(F.gelu(self.up(self.mlp_norm(x_NTD)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder-only transformer in GPT-2's shape.

    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3; Press and Wolf 2017
        (arXiv 1608.05859) for the tied embedding.
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)  # the output's matrix, too
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw the first weights as GPT-2 does.

        Each of the 2 L branches adds to the stream. Their sum has the variance of one if each has a 2 L-th of it,
        so the last matrix of a branch gets its standard deviation divided by the root of 2 L.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=STD)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.token.weight, std=STD)
        nn.init.normal_(self.position.weight, std=POSITION_STD)
        for block in self.blocks:
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=STD / math.sqrt(2 * self.shape.layers))

    def forward(self, token_NT: torch.Tensor) -> torch.Tensor:
        """Return a score for each possible next token, at each position.

        Args:
            token_NT: whole numbers below V, at most `context` in a row.
        Returns:
            Scores without a softmax, (N, T, V).
        Raises:
            ValueError: the rows are longer than the context.
        """
        tokens = token_NT.shape[1]
        if tokens > self.shape.context:
            raise ValueError(f"{tokens} tokens in a row, and this model has {self.shape.context} positions; cut them")
        x_NTD = self.token(token_NT) + self.position.weight[:tokens]
        for block in self.blocks:
            x_NTD = block(x_NTD)
        return F.linear(self.norm(x_NTD), self.token.weight)


# --- What surrounds a model ------------------------------------------------------------------------


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return parameter groups for AdamW, with decay for matrices only.

    Biases and LayerNorm's scales are one number a feature. There are few of them, and pulling a scale towards 0 turns
    its feature off.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]


def flops_per_token(model: GPT) -> int:
    """Return the floating point operations that training on one token takes, forward and backward.

    A weight of a matrix is used for one multiplication and one addition forward, and for twice as many backward: 6.
    The tied matrix multiplies once, as the output; as the input it is looked up. Positions are only added. In each
    layer, attention compares a token with T others and mixes T others: 2 x 2 x T x D forward, 12 T D in all. Half of
    that is behind the causal mask; it is counted all the same, as is usual.

    Source: Chowdhery et al. 2022 (arXiv 2204.02311), appendix B.
    """
    shape = model.shape
    multiplied = sum(parameter.numel() for parameter in model.parameters()) - model.position.weight.numel()
    return 6 * multiplied + 12 * shape.layers * shape.width * shape.context


@torch.no_grad()
def generate(
    model: GPT,
    prompt_T: torch.Tensor,
    count: int,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Go on from a prompt, one token after the other, each drawn by its probability.

    Args:
        model: bare. DDP's forward pass is a matter of all ranks; only one writes.
        prompt_T: at least one token.
        temperature: below 1, likely tokens become likelier; 0 always takes the likeliest.
    Returns:
        The prompt and `count` more tokens.
    Raises:
        ValueError: the prompt is empty.
    """
    if not len(prompt_T):
        raise ValueError("the prompt is empty: give at least one token to go on from")
    model.eval()
    tokens = prompt_T
    for _ in range(count):
        score_V = model(tokens[None, -model.shape.context :])[0, -1].float()
        if temperature == 0:
            token = score_V.argmax(dim=-1, keepdim=True)
        else:
            token = torch.multinomial((score_V / temperature).softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, token])
    return tokens
