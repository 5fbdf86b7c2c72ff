"""`%%ranks`: state between cells, what is shown, and mistakes."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from ddp_course import RankError, load_ipython_extension
from ddp_course.launcher.settings import Settings

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell.instance()
    shell.kernel = "what makes it a notebook's"
    load_ipython_extension(shell)
    yield shell
    shell.run_line_magic("ranks", "stop")
    InteractiveShell.clear_instance()


@pytest.fixture
def ranks(shell, capsys):
    """Run a `%%ranks` cell and return what it printed."""

    def run(line: str, cell: str) -> str:
        shell.run_cell_magic("ranks", line, cell)
        return capsys.readouterr().out

    return run


def test_a_notebook_forks_and_leaves_the_header_line_out_and_explicit_settings_win(shell, monkeypatch):
    def chosen(**given) -> tuple[str | None, bool]:
        settings = Settings.of(2, {"backend": "gloo", **given})
        return settings.start_method, settings.header

    assert chosen() == ("forkserver", False)
    assert chosen(start_method="spawn", quiet=False) == ("spawn", True)
    monkeypatch.delattr(shell, "kernel")  # IPython in a terminal
    assert chosen() == ("spawn", True)
    assert chosen(start_method="forkserver", quiet=True) == ("forkserver", False)


def test_ranks_must_be_started_with_a_number(shell, ranks):
    shell.run_line_magic("ranks", "stop")
    with pytest.raises(UsageError, match="say how many, such as %%ranks 2"):
        ranks("", "1")


def test_variables_stay_and_the_last_value_is_shown_by_rank(ranks):
    out = ranks("2", "x = torch.ones(2) * (rank + 1)\ndist.all_reduce(x)\nx")
    assert out.splitlines()[-2:] == ["rank 0 → tensor([3., 3.])", "rank 1 → tensor([3., 3.])"]
    assert ranks("", "y = x * rank\nprint(world_size)\ny.sum().item()").splitlines() == [
        "rank 0 | 2",
        "rank 1 | 2",
        "rank 0 → 0.0",
        "rank 1 → 6.0",
    ]
    assert ranks("", "y = 1") == ""
    assert ranks("", "def double(v):\n    return 2 * v\ndouble(rank)") == "rank 0 → 0\nrank 1 → 2\n"
    assert ranks("", "str(device)") == "rank 0 → 'cpu'\nrank 1 → 'cpu'\n"


def test_long_values_are_indented(ranks):
    assert "rank 0 → tensor([[1., 0.],\n" + " " * 9 + "        [0., 1.]])\n" in ranks("2", "torch.eye(2)")


def test_push_and_pull(shell, ranks):
    shell.user_ns["rate"] = 0.5
    ranks("2 --push rate --pull 'mine, rank'", "mine = rate * rank")
    assert (shell.user_ns["mine"], shell.user_ns["rank"]) == ([0.0, 0.5], [0, 1])
    with pytest.raises(UsageError, match="no variable nowhere"):
        ranks("--push nowhere", "1")


def test_a_mistake_keeps_the_variables(ranks):
    ranks("2", "kept = rank + 10")
    with pytest.raises(RankError, match="rank 1 of 2 raised NameError") as caught:
        ranks("", "if rank == 1:\n    wrong_name")
    assert "the cell, line 2, in <module>\n    wrong_name" in str(caught.value)
    assert ranks("", "kept") == "rank 0 → 10\nrank 1 → 11\n"
    with pytest.raises(RankError, match="SyntaxError"):
        ranks("", "def :")


def test_a_death_ends_the_ranks_and_the_next_cell_says_so(ranks):
    ranks("2", "kept = 1")
    with pytest.raises(RankError, match="rank 1 of 2 died"):
        ranks("", "import os\nif rank == 1:\n    os._exit(3)\ndist.barrier()")
    out = ranks("", "'kept' in globals()")
    assert out.splitlines() == [
        "the ranks had ended: new ones start, without the old ones' variables",
        "rank 0 → False",
        "rank 1 → False",
    ]


def test_another_number_starts_other_ranks(ranks):
    assert ranks("3", "world_size").splitlines() == ["rank 0 → 3", "rank 1 → 3", "rank 2 → 3"]


@pytest.mark.parametrize(
    ("line", "says"), [("two", "expected a number of ranks"), ("--bogus", "unrecognized arguments: --bogus")]
)
def test_a_wrong_line_is_one_sentence(ranks, line, says):
    with pytest.raises(UsageError, match=says):
        ranks(line, "1")


def test_its_options_are_told(shell):
    told = shell.find_line_magic("ranks").__doc__
    example = "    %%ranks 2 --pull total\n    mine = torch"
    for option in ("--backend", "--timeout SECONDS", "(default: 60)", "--push NAMES", "--pull NAMES", example):
        assert option in told


def test_line_magic_tells_and_stops(shell, ranks, capsys):
    ranks("2", "1")
    shell.run_line_magic("ranks", "")
    assert capsys.readouterr().out == "2 ranks are up\n"
    shell.run_line_magic("ranks", "stop")
    assert capsys.readouterr().out == "the ranks have ended\n"
    shell.run_line_magic("ranks", "")
    assert capsys.readouterr().out == "no ranks are up\n"
    with pytest.raises(UsageError, match="%%ranks 4"):
        shell.run_line_magic("ranks", "4")
