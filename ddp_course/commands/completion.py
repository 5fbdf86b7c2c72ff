"""How does a shell come to complete `ddp-course`? It reads a script once, which this command prints.

ddp-course completion bash > ~/.local/share/bash-completion/completions/ddp-course
ddp-course completion zsh > ~/.zfunc/_ddp-course        # a folder of your fpath

The script holds all words and options, so that completing starts no Python, which would import torch each time.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from unittest import mock

import shtab

from ddp_course.cli import COMMANDS


def main(argv: list[str]) -> int:
    """Print the script of a shell; return 0."""
    parser = argparse.ArgumentParser(prog="ddp-course completion", description="Print what completes these words.")
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    shell = parser.parse_args(argv).shell
    whole = argparse.ArgumentParser(prog="ddp-course")
    words = whole.add_subparsers()
    for word, purpose in COMMANDS.items():
        words.add_parser(word, help=purpose, parents=[parser_of(word)], add_help=False)
    print(shtab.complete(whole, shell))
    return 0


def parser_of(word: str) -> argparse.ArgumentParser:
    """Return the parser with which a command reads its options: the one that would print its help."""
    parser = argparse.ArgumentParser
    with mock.patch.object(parser, "print_help", autospec=True) as shown, suppress(SystemExit):
        import_module(f"ddp_course.commands.{word}").main(["--help"])
    found = shown.call_args.args[0]
    for action in found._actions:
        if action.type is Path or not (action.option_strings or action.choices):
            action.complete = shtab.FILE
    return found
