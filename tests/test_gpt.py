"""The model is GPT-2's, in its numbers of parameters and operations; nothing looks ahead; the embedding is tied."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddp_course.gpt import GPT, SIZES, Attention, GPTShape, flops_per_token, generate, weight_decay_groups

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

TINY = SIZES["tiny"]


def model_of(shape: GPTShape = TINY, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(shape).double()


def rows(n: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (n, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "exactly"), [("tiny", None), ("mini", None), ("small", None), ("gpt2", 124_439_808)])
def test_every_size_has_the_parameters_that_its_numbers_say_and_gpt2_has_gpt2s(name, exactly):
    shape = SIZES[name]
    with torch.device("meta"):  # no memory is needed to count
        found = sum(parameter.numel() for parameter in GPT(shape).parameters())
    block = 12 * shape.width**2 + 13 * shape.width  # 3 + 1 + 4 + 4 matrices, their biases, and two norms
    vocabulary = 50257 if exactly else 256
    assert found == (vocabulary + shape.context) * shape.width + shape.layers * block + 2 * shape.width
    assert exactly in (None, found)


def test_the_first_weights_are_drawn_as_gpt2s():
    torch.manual_seed(0)
    model = GPT(SIZES["mini"])
    for block in model.blocks:
        for last in (block.attention.out, block.down):
            assert last.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.03)
        for first in (block.attention.query_key_value, block.up):
            assert first.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.token.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.position.weight.std().item() == pytest.approx(0.01, rel=0.03)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.all(parameter == (1.0 if "norm.weight" in name else 0.0)), name
    # Weights so small make all tokens nearly equally likely.
    x, other = rows(4, 64), rows(4, 64, seed=1)
    assert F.cross_entropy(model(x).flatten(0, 1), other.flatten()).item() == pytest.approx(math.log(256), abs=0.1)


# --- Who sees what ---------------------------------------------------------------------------------


def test_a_changed_future_changes_nothing_before_it():
    model, x = model_of(), rows(3, 32)
    for place in (1, 16, 31):
        other = x.clone()
        other[:, place:] = (other[:, place:] + 1) % 256
        before, after = model(x), model(other)
        assert torch.equal(before[:, :place], after[:, :place])
        assert (before[:, place] != after[:, place]).any()


def test_attention_is_the_softmax_of_the_scaled_products_over_the_past():
    torch.manual_seed(0)
    attention = Attention(TINY).double()
    x = torch.randn(2, 9, TINY.width, dtype=torch.float64)
    query, key, value = attention.query_key_value(x).split(TINY.width, dim=-1)
    width, mixed = TINY.width // TINY.heads, torch.zeros_like(x)
    for head in range(TINY.heads):
        part = slice(head * width, (head + 1) * width)
        for place in range(9):
            score = (key[:, : place + 1, part] * query[:, place : place + 1, part]).sum(-1) / math.sqrt(width)
            mixed[:, place, part] = (score.softmax(-1)[..., None] * value[:, : place + 1, part]).sum(1)
    torch.testing.assert_close(attention(x), attention.out(mixed), rtol=1e-12, atol=1e-12)


def test_wrong_shapes_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="width=30 cannot be divided among heads=4"):
        GPTShape(layers=1, heads=4, width=30, context=8)
    with pytest.raises(ValueError, match="33 tokens in a row, and this model has 32 positions"):
        model_of()(rows(1, 33))


# --- The tied matrix -------------------------------------------------------------------------------


def test_the_tied_matrix_gets_the_sum_of_both_gradients():
    model, x = model_of(), rows(2, 16)
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()

    as_input, as_output = (model.token.weight.detach().clone().requires_grad_() for _ in range(2))
    stream = F.embedding(x, as_input) + model.position.weight[:16].detach()
    for block in model.blocks:
        stream = block(stream)
    F.cross_entropy(F.linear(model.norm(stream), as_output).flatten(0, 1), x.flatten()).backward()
    torch.testing.assert_close(model.token.weight.grad, as_input.grad + as_output.grad, rtol=1e-12, atol=1e-14)
    assert as_input.grad.abs().max() > 0 < as_output.grad.abs().max()


def test_only_matrices_decay_and_no_parameter_is_left_out():
    model = model_of()
    decayed, others = weight_decay_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in others["params"]} == {1}
    given = [id(parameter) for group in (decayed, others) for parameter in group["params"]]
    assert sorted(given) == sorted(id(parameter) for parameter in model.parameters())


# --- Arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [TINY, GPTShape(layers=3, heads=1, width=24, context=40, vocabulary=100)])
def test_the_operations_are_those_that_torch_counts(shape):
    """Torch counts the matrix products; ours also takes biases and norms for multiplied, as the paper does."""
    torch.manual_seed(0)
    model = GPT(shape)
    x = torch.randint(shape.vocabulary, (3, shape.context))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert counted.get_total_flops() == (flops_per_token(model) - 6 * vectors) * x.numel()


# --- Writing ---------------------------------------------------------------------------------------


def test_at_temperature_0_the_likeliest_token_follows_also_beyond_the_context():
    model, tokens = model_of(), rows(1, 5)[0]
    written = generate(model, tokens, 40, temperature=0)
    assert len(written) == 45 and torch.equal(written[:5], tokens)
    for place in range(5, 45):
        assert written[place] == model(written[None, max(0, place - 32) : place])[0, -1].argmax()


def test_a_generator_decides_what_is_written():
    model, tokens = model_of(replace(TINY, layers=1)), rows(1, 1)[0]
    one, again, other = (generate(model, tokens, 30, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_tokens_are_drawn_by_their_probability():
    model, tokens = model_of(replace(TINY, vocabulary=3)), torch.tensor([0, 2, 1])
    model.token.weight.data *= 2  # no longer equal
    expected = (model(tokens[None])[0, -1] / 0.5).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([generate(model, tokens, 1, 0.5, generator)[-1] for _ in range(400)])
    assert 0.01 < expected.min() < expected.max() < 0.95
    torch.testing.assert_close(drawn.bincount(minlength=3) / 400, expected.float(), rtol=0, atol=0.1)


def test_nothing_to_go_on_from_is_refused():
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(model_of(), torch.tensor([], dtype=torch.int64), 3)
