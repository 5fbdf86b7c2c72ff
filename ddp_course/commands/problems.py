"""The command `ddp-course problems`: small problems with numeric answers.

ddp-course problems                                   # the problems of each lesson
ddp-course problems 14                                # lesson 14's, with new numbers; in a terminal it asks for answers
ddp-course problems 14 --seed 7                       # with the numbers of seed 7
ddp-course problems 14 --seed 7 --answer 3 "1.5 GB"   # is it right, and if not, why?
Read next: `problems/problem.py`, how a problem is made and an answer judged.
"""

from __future__ import annotations

import argparse
import sys

from ddp_course.problems.sheet import LESSONS, SEEDS, Sheet, problems, words


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ddp-course problems",
        description="Solve small problems with numeric answers; what is right was counted or simulated.",
        epilog="An answer has a unit: 1.5 GB, 1.4 GiB, 12 Gbit, 0.012 s, 37%%; GB is 10^9 bytes. Exit status: 0 the "
        "problems are shown, or all answers are right; 1 an answer is wrong; 2 an argument or an answer is not "
        "understood.",
    )
    parser.add_argument("lesson", nargs="?", type=int, help=f"one of {', '.join(map(str, LESSONS))}; without: a list")
    parser.add_argument("--seed", type=int, help=f"which numbers (default: a new seed up to {SEEDS}, which is printed)")
    parser.add_argument(
        "--answer", nargs=2, action="append", metavar=("NUMBER", "VALUE"), help='a problem\'s number and "1.5 GB"'
    )
    options = parser.parse_args(argv)
    if options.lesson is None:
        if options.answer or options.seed is not None:
            parser.error("name the lesson: ddp-course problems 14 --seed 7")
        print(listing())
        return 0
    try:
        if options.answer:
            if options.seed is None:
                raise ValueError("an answer belongs to numbers: give the --seed that was printed with them")
            return judged(problems(options.lesson, options.seed), options.answer)
        sheet = problems(options.lesson, options.seed)
    except ValueError as error:
        parser.error(str(error))
    if sys.stdin.isatty() and sys.stdout.isatty():
        return asked(sheet)
    print(
        sheet, f"ddp-course problems {sheet.lesson} --seed {sheet.seed} --answer 1 VALUE judges an answer.", sep="\n\n"
    )
    return 0


def listing() -> str:
    """The titles of all lessons' problems."""
    lines = []
    for lesson in LESSONS:
        lines += [f"Lesson {lesson:02}"]
        lines += [f"  {number:2}  {each['title']}" for number, each in enumerate(words(lesson).values(), 1)]
    return "\n".join([*lines, "", "ddp-course problems LESSON prints a lesson's, with numbers."])


def judged(sheet: Sheet, answers: list[list[str]]) -> int:
    """Say of each answer whether it is right; return the exit status."""
    found = []
    for number, text in answers:
        if not number.isdecimal():
            raise ValueError(f"{number!r} is no problem's number")
        right, said = sheet.instance(int(number)).judged(text)
        found.append(right)
        print(f"{number}: {said}" if len(answers) > 1 else said)
    return 0 if all(found) else 1


def asked(sheet: Sheet) -> int:
    """Ask one problem after the other, each until its answer is right; return the exit status.

    An empty line shows the answer and goes on, q ends.
    """
    print(f"{sheet.head}\nAn empty line shows the answer, q ends.")
    first = []  # whether the first answer to each was right
    for number, instance in enumerate(sheet.instances, 1):
        print(f"\n{sheet.question(number)}")
        right, tries = False, 0
        while not right:
            try:
                line = input("> ").strip()
            except EOFError:
                line = "q"
            if line == "q":
                return ended(first)
            if not line:
                print(f"It is {instance.answer}.")
                break
            try:
                right, said = instance.judged(line)
            except ValueError as error:
                said = f"{error}."
            else:
                tries += 1
            print(said)
        first.append(right and tries == 1)
    return ended(first)


def ended(first: list[bool]) -> int:
    if first:
        print(f"\n{sum(first)} of {len(first)} at the first try.")
    return 0 if all(first) else 1
