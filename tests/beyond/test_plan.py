"""The plan's advice follows from its table, and a figure that makes no sense is refused with a way out."""

import json

import pytest
import torch
import torch.nn.functional as F

from ddp_course.beyond.activations import counted
from ddp_course.beyond.memory import Strategy, memory_of
from ddp_course.beyond.plan import in_torch, plan, to_bytes, to_count
from ddp_course.cli import main as command
from ddp_course.commands.plan import main
from ddp_course.models import MLP


def test_a_small_model_is_left_to_ddp():
    answer = plan("1B", 8, "80GB")
    assert answer.recommended.name == "DDP"
    assert "nothing more is needed" in answer.reasons and answer.changes == ()


def test_seven_billion_with_adam_do_not_fit_under_ddp_and_do_when_divided():
    answer = plan(7e9, 8, "80GB")
    ddp, fsdp = answer["DDP"], answer["FSDP"]
    assert not ddp.fits and ddp.memory.total > 16 * 7e9
    assert fsdp.fits and 16 * 7e9 / 8 < fsdp.memory.total < 16 * 7e9 / 8 + 10e9
    assert answer.recommended.strategy.divided >= 2
    assert "DDP would need" in answer.reasons


def test_the_first_that_fits_is_taken_and_never_data_parallel():
    for params in (1e8, 1e9, 3e9, 7e9, 2e10):
        answer = plan(params, 8, "80GB")
        fitting = [option.name for option in answer.options if option.fits and option.name != "DataParallel"]
        assert (answer.recommended.name if answer.recommended else None) == next(iter(fitting), None)
        for option in answer.options:
            assert option.fits == (option.memory.total <= 0.9 * 80e9)
            assert option.strategy.gpus == 8 or option.name == "DataParallel"


def test_what_to_change_is_tried_out():
    answer = plan(7e10, 8, "80GB")
    assert answer.recommended is None
    assert "comes closest" in answer.reasons
    more = next(change for change in answer.changes if "such GPUs" in change)
    assert more == "Take 32 such GPUs, on 4 nodes: then FSDP fits."
    assert plan(7e10, 32, "80GB", nodes=4).recommended.name == "FSDP"
    assert plan(7e10, 16, "80GB", nodes=2).recommended is None


def test_a_change_that_helps_really_helps():
    answer = plan(7e9, 8, "40GB", local_batch=8, sequence=2048)
    assert answer.recommended is None
    assert any("--checkpointing" in change for change in answer.changes)
    assert plan(7e9, 8, "40GB", local_batch=8, sequence=2048, checkpointing=True).recommended is not None


def test_tensor_parallel_stays_inside_a_node():
    answer = plan(7e10, 64, "80GB", nodes=8)
    assert max(option.strategy.tensor for option in answer.options) == 8
    assert all(option.strategy.gpus == 64 for option in answer.options)


def test_a_counted_model_is_planned_as_the_arithmetic_says():
    model, classes = MLP(64, 256, 10), torch.zeros(32, dtype=torch.long)
    parts = [("hidden", model.hidden), ("scores", model.scores)]
    units = counted(model, parts, torch.zeros(32, 64), lambda scores: F.cross_entropy(scores, classes))
    answer = plan(gpus=2, gpu_memory="2MB", units=units, precision="fp32")
    assert answer["FSDP"].memory == memory_of(units, Strategy(data=2, divided=3))
    assert not any("tensor" in option.name for option in answer.options)
    assert answer.recommended.name == next(o.name for o in answer.options if o.fits and o.name != "DataParallel")
    assert "MB a GPU" in str(answer)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--params", "70", "--gpus", "8"], "too few to guess"),
        (["--params", "many"], "write it as 7e9, 7B or 124M"),
        (["--params", "1.2.3e9"], "write it as 7e9, 7B or 124M"),
        (["--params=-7e9"], "write it as 7e9, 7B or 124M"),
        (["--params", "7e9", "--gpu-memory", "80"], "write a number and its unit"),
        (["--params", "7e9", "--gpu-memory", "80QB"], "write a number and its unit"),
        (["--params", "7e9", "--gpus", "0"], "gpus is 0"),
        (["--params", "7e9", "--gpus", "8", "--nodes", "3"], "give a multiple of 3"),
        (["--params", "7e9", "--precision", "fp8"], "there are fp32, autocast, master, bf16"),
        (["--params", "7e9", "--optimizer", "lion"], "there are adamw, momentum, sgd"),
        (["--params", "7e9", "--loop", "fast"], "there are foreach, fused, single"),
        (["--gpus", "8"], "give the parameters"),
        (["--layers", "8"], "give both layers and hidden"),
        (["--params", "7e9", "--local-batch", "0"], "local-batch is 0"),
    ],
)
def test_figures_that_make_no_sense(arguments, said, capsys):
    try:
        status = main(arguments)
    except SystemExit as left:  # argparse's own refusal
        status = left.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_sizes_and_counts():
    assert to_bytes("80GB") == 80e9 and to_bytes("40 GiB") == 40 * 2**30 and to_bytes("1.5tb") == 1.5e12
    assert to_count("7e9") == to_count("7B") == 7e9 and to_count("124M") == 124e6


def test_the_command_prints_a_table_and_json(capsys):
    assert command(["plan", "--params", "7e9", "--gpus", "8", "--gpu-memory", "80GB"]) == 0
    said = capsys.readouterr().out
    assert "ZeRO-1" in said and "Take FSDP (kept)" in said and "In torch: fully_shard" in said
    assert command(["plan", "--params", "7e10", "--gpus", "8", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["recommended"] is None and answer["changes"]
    for option in answer["options"]:
        parts = option["bytes"]
        assert parts["sum"] == pytest.approx(sum(size for name, size in parts.items() if name != "sum"))


def test_each_strategy_has_its_name_in_torch():
    assert in_torch(Strategy()) == "nothing but a training loop"
    assert "ZeroRedundancyOptimizer" in in_torch(Strategy(data=2, divided=1))
    assert in_torch(Strategy(data=2, tensor=2, stages=2)).count(",") == 2
