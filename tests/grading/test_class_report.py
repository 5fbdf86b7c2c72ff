"""What a teacher gets: tables that a learning platform reads, and a page on what a class found hard."""

import csv
from html.parser import HTMLParser

import nbformat

from ddp_course.grading import registry
from ddp_course.grading.instructor.class_report import failed_checks, lesson_facts, write_report
from ddp_course.grading.instructor.classroom import Graded
from ddp_course.grading.instructor.marks import write_marks
from ddp_course.grading.registry import exercises_of
from ddp_course.grading.sandbox.boxed import VERDICTS
from tests.grading.submissions import cell_of, filled, released, solutions, submit

FULL = {exercise.id: float(exercise.points) for exercise in exercises_of("03")}
SUM_BY_REDUCE = """
def node_sum(x, ranks_per_node):
    groups = []
    for first in range(0, dist.get_world_size(), ranks_per_node):
        groups.append(dist.new_group(list(range(first, first + ranks_per_node))))
    mine = groups[dist.get_rank() // ranks_per_node]
    total = x.clone()
    dist.all_reduce(total, group=mine)
    return total
"""


def rows(path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_a_platform_gets_a_row_for_each_student_and_no_zero_where_nothing_was_graded(tmp_path):
    none, unread = dict.fromkeys(FULL, 0.0), "nobody has read the question's answer yet"
    submissions = [
        Graded("ada", "03", FULL, question=2, seconds=3),
        Graded("ada", "00", {e.id: 1.0 for e in exercises_of("00")}),
        Graded("o'brien, m", "03", none | {"03.2": 2.5}, notes=["late"]),
        Graded("eve", "03", none, reason="the file is empty"),
    ]
    paths = write_marks(submissions, tmp_path)
    assert [path.name for path in paths] == ["grades.csv", "grades_canvas.csv", "grades_moodle.csv"]
    names = ["00_start_here", "03_process_groups"]
    of = [str(sum(e.points for e in exercises_of(lesson)) + registry.QUESTION_POINTS) for lesson in ("00", "03")]
    assert rows(paths[1]) == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *names],
        ["Points Possible", "", "", "", "", *of],
        ["ada", "", "", "ada", "", "3", "25"],
        ["o'brien, m", "", "", "o'brien, m", "", "", "2.5"],
        ["eve", "", "", "eve", "", "", ""],
    ]
    assert rows(paths[2])[2:] == [["o'brien, m", "", "2.5"], ["eve", "", ""]]
    assert rows(paths[0])[0] == [
        "student",
        "lesson",
        "points",
        "of",
        *(f"exercise {n}" for n in range(1, 6)),
        "question",
        "remark",
    ]
    assert rows(paths[0])[1][-3:] == ["3", "2", ""]
    assert rows(paths[0])[2] == ["ada", "00", "3", of[0], "1", "1", "1", "", "", "", unread]
    assert rows(paths[0])[3][-2:] == ["", f"late; {unread}"]
    assert rows(paths[0])[4] == ["eve", "03", "0", of[1], "0", "0", "0", "0", "0", "", "not graded: the file is empty"]


def judged(into, student: str, answers: dict[str, str], failed: tuple[tuple[str, int, str], ...] = ()) -> Graded:
    """A submission as grading leaves it, which failed these checks: (exercise, number of the check, cause)."""
    notebook, points = filled("03", answers), dict(FULL)
    for exercise in exercises_of("03"):
        verdicts = [{"check": c.name, "points": c.points, "of": c.points, "reached": True, "cause": ""}
                    for c in exercise.checks]  # fmt: skip
        for _, number, cause in (f for f in failed if f[0] == exercise.id):
            verdicts[number] |= {"points": 0, "cause": cause}
            points[exercise.id] -= verdicts[number]["of"]
        cell_of(notebook, registry.test_cell(exercise.id)).metadata[VERDICTS] = verdicts
    submit(into / "autograded", student, notebook)
    return Graded(student, "03", points, seconds=len(student))


class Texts(HTMLParser):
    """The text of a page, and its tags."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.parts = set(), []
        self.feed(page)
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.parts.append(data)


def test_the_page_says_what_failed_and_why(tmp_path):
    right = solutions("03")
    names = [check.name for check in exercises_of("03")[0].checks]
    submissions = [
        judged(tmp_path, "ada", right),
        judged(tmp_path, "ben", right | {"03.3": SUM_BY_REDUCE}, (("03.1", 0, "<b>bold</b>"), ("03.1", 1, "first"))),
        judged(tmp_path, "cleopatra", {"03.3": SUM_BY_REDUCE.replace("mine", "my_group")}, (("03.1", 1, "first"),)),
        judged(tmp_path, "dan", {}, (("03.1", 1, "second"),)),
        Graded("eve <script>", "03", dict.fromkeys(FULL, 0.0), reason="the file is empty"),
    ]
    facts = lesson_facts("03", submissions, tmp_path)
    assert (facts["graded"], facts["of"], facts["not_graded"]) == (4, 23, [("eve <script>", "the file is empty")])
    assert [(row["check"], row["failed"], row["judged"], row["causes"]) for row in facts["checks"]] == [
        (names[1], 3, 4, [("first", 2), ("second", 1)]),
        (names[0], 1, 4, [("<b>bold</b>", 1)]),
    ]
    assert [each.student for each in facts["slowest"]] == ["cleopatra", "ada", "ben", "dan"]
    page = Texts(write_report(submissions, tmp_path).read_text(encoding="utf-8"))
    assert "4 graded, 1 not graded. Of the 23 points of the exercises, the mean is" in page.text
    assert "4 answers to the question wait for a person" in page.text and "<b>bold</b>" in page.text
    assert "eve <script>" in page.text and page.tags.isdisjoint({"script", "b", "img", "iframe"})
    assert list(tmp_path.glob("*.part")) == []


def test_a_class_of_which_nothing_could_be_graded_has_a_page(tmp_path):
    page = Texts(write_report([Graded("eve", "03", {}, reason="empty")], tmp_path).read_text(encoding="utf-8"))
    assert "0 graded, 1 not graded" in page.text and "None failed." in page.text


def test_a_check_that_was_not_reached_did_not_fail():
    notebook = nbformat.read(released("03"), as_version=4)
    verdict = {"check": "a", "points": 0, "of": 2, "cause": ""}
    cell_of(notebook, registry.test_cell("03.1")).metadata[VERDICTS] = [
        verdict | {"reached": True},
        verdict | {"check": "b", "reached": False},
    ]
    assert [(row["check"], row["failed"]) for row in failed_checks("03", [notebook])] == [("a", 1)]
