"""Does the page hold every event where it belongs, and does it step, in a browser, without an error?"""

import html
import json
import re

import pytest

from ddp_course.commands import read as command
from ddp_course.draw.events import ORDER_OF_CALLS, Event, Recording
from ddp_course.draw.replays import replay
from tests.notebooks.test_browser import BROWSER_FLAGS, browser_path  # noqa: F401  (a fixture)

STEP = Recording(
    [
        Event(1, "forward", 0.001, 0.002, "forward"),
        Event(0, "forward", 0.0, 0.002, "forward"),
        Event(0, "all_reduce", 0.001, 0.004, "all-reduce", 4000, "train.py, line 3: </script> & \"quotes\""),
        Event(0, "all_reduce", 0.003, 0.006, "all-reduce", 2**20),
        Event(0, "AddmmBackward0", 0.002, 0.003, "backward"),
    ],
    True,
    "One step.",
)  # fmt: skip
ORDER = Recording(
    [Event(rank, f"#{n}", n, n + 1, "all-reduce") for rank, n in ((0, 0), (1, 0), (0, 1))], False, "Order."
)
LOG = Recording(
    [Event(rank, "lost", 5.0, 5.0, "log", line=f"a.log:{n}") for n, rank in enumerate((None, 2, 2))], True, ""
)


def data_of(page):
    return json.loads(re.search(r"<script id='data' type='application/json'>(.*?)</script>", page, re.DOTALL)[1])


def test_events_are_in_the_order_of_their_start_and_in_rows_in_which_none_covers_another():
    found = data_of(replay(STEP, "A step").page)
    assert (found["timed"], found["length"], found["lanes"]) == (True, 0.006, ["forward", "all-reduce", "backward"])
    assert [(name, rows) for name, _, rows in found["ranks"]] == [("rank 0", 3), ("rank 1", 1)]
    told = [(e[0], e[1], found["texts"][e[3]], e[4], e[5], e[6]) for e in found["events"]]
    assert told == [
        (0, 0, "forward", 0.0, 0.002, None),
        (0, 1, "all_reduce", 0.001, 0.004, 4000),
        (1, 0, "forward", 0.001, 0.002, None),
        (0, 0, "AddmmBackward0", 0.002, 0.003, None),
        (0, 2, "all_reduce", 0.003, 0.006, 2**20),
    ]
    assert found["texts"][found["events"][1][7]] == STEP.events[2].line


def test_moments_at_one_time_lie_below_each_other_and_have_room_at_the_end():
    found = data_of(replay(LOG, "A job").page)
    assert [name for name, *_ in found["ranks"]] == ["no rank named", "rank 2"]
    assert [each[:2] for each in found["events"]] == [[0, 0], [1, 0], [1, 1]]
    assert found["length"] > found["events"][-1][5]


def test_a_page_of_very_many_events_has_the_last_and_says_so_in_300_kB():
    many = [Event(0, f"{n} {'x' * 200}", n, n + 1, "log", line=f"a.log:{n}") for n in range(3000)]
    page = replay(Recording(many, False, ""), "Many").page
    last = data_of(page)["texts"][-2]
    assert last.startswith("2999 xxx") and len(last) == 160 and len(page) < 300_000
    kept = len(data_of(page)["events"])
    assert 500 < kept < 3000 and f"These are the last {kept:,} of 3,000 events" in page


def test_a_cell_shows_the_page_itself_and_words_that_no_run_changes(tmp_path):
    shown = replay(STEP, "A step", "more <words>")
    inside = re.fullmatch(r'<iframe title="(.*?)" style="[^"]*" srcdoc="([^"]*)"></iframe>', shown._repr_html_())
    assert html.unescape(inside[2]) == shown.page == shown.write(tmp_path / "a.html").read_text("utf-8")
    assert inside[1] == repr(shown) == "A step: a replay of 2 ranks, 2 collectives or messages"
    assert "more &lt;words&gt;" in shown.page and "{{" not in shown.page


def test_nothing_to_replay_is_said():
    with pytest.raises(ValueError, match="nothing to replay"):
        replay(Recording([], True, ""), "Nothing")


def test_the_command_writes_the_page_of_a_job_with_what_it_died_of(tmp_path, capsys):
    entry = {"profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "input_dtypes": ["Float"]}
    for rank, calls in ((0, 3), (1, 2)):
        entries = [{**entry, "collective_seq_id": n + 1} for n in range(calls)]
        (tmp_path / f"dump_{rank}").write_text(json.dumps({"entries": entries}))
    page = tmp_path / "job.html"
    assert command.main([str(tmp_path), "--replay", str(page)]) == 0
    assert f"replay: {page}" in capsys.readouterr().err
    text = page.read_text("utf-8")
    assert "rank: rank 1" in text and ORDER_OF_CALLS in text and len(data_of(text)["events"]) == 5
    (tmp_path / "a.log").write_text("step 1\n")
    assert command.main([str(tmp_path / "a.log"), "--replay", str(tmp_path / "none.html")]) == 1
    assert "nothing to replay" in capsys.readouterr().err and not (tmp_path / "none.html").exists()


@pytest.fixture(scope="module")
def browser(browser_path):  # noqa: F811
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=browser_path, args=BROWSER_FLAGS)
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """A function that opens a page of HTML at a width; at the end, it has said nothing and fetched nothing."""
    said = []

    def open_page(text, width=900, scheme="light"):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 600}, color_scheme=scheme)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda asked: said.append(asked.url) if not asked.url.startswith("file:") else None)
        page.goto((tmp_path / "page.html").as_uri())
        return page

    yield open_page
    assert said == []


@pytest.mark.slow
def test_keys_and_pointer_step_through_the_events(opened):
    page = opened(replay(STEP, "A step").page)
    said = page.locator("#told")
    assert said.inner_text() == "rank 0: forward; 0 ms to 2 ms, 2 ms long"
    page.keyboard.press("ArrowRight")
    assert said.inner_text().split("\n") == [
        "rank 0: all_reduce, 4,000 bytes; 1 ms to 4 ms, 3 ms long",
        STEP.events[2].line,
    ]
    assert page.locator(".head").all_inner_texts() == ["rank 0 forward · all_reduce, 4,000 bytes", "rank 1 forward"]
    page.keyboard.press("Shift+ArrowRight")
    assert said.inner_text() == "rank 0: all_reduce, 1.0 MiB (1,048,576 bytes); 3 ms to 6 ms, 3 ms long"
    assert page.locator("#at").get_attribute("aria-valuetext") == "5 of 5"
    page.keyboard.press("ArrowRight")  # there is no other
    page.locator("#at").press("ArrowLeft")  # one step, not the slider's own as well
    assert "AddmmBackward0, backward; 2 ms to 3 ms" in said.inner_text()
    page.locator("[data-index='2']").hover()
    assert said.inner_text().startswith("rank 1: forward")
    box = page.locator("#ruler").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 10)  # 2.4 ms
    page.mouse.down()
    page.mouse.up()
    assert page.locator(".head").all_inner_texts()[1] == "rank 1 nothing on record"
    page.get_by_role("button", name="Zoom in").click()
    assert (
        page.evaluate("document.getElementById('chart').clientWidth / document.getElementById('view').clientWidth") == 2
    )


@pytest.mark.slow
def test_every_width_and_theme_is_filled_and_a_lesson_hands_its_theme_on(opened):
    for (width, scheme, paper), recording in zip(
        ((400, "light", "rgb(255, 255, 255)"), (900, "dark", "rgb(23, 24, 27)"), (1500, "light", "rgb(255, 255, 255)")),
        (STEP, ORDER, LOG),
        strict=True,
    ):
        page = opened(replay(recording, "A run").page, width, scheme)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.getElementById('view').scrollWidth") == width - 26
        assert page.locator(".bar").count() == len(recording.events)
        page.locator("summary").click()
        page.locator("td").last.wait_for()  # the browser tells of the opening a moment later
        assert page.locator("td").count() == 2 * len(recording.events)
    lesson = f"<!doctype html><html data-theme='dark'><body>{replay(ORDER, 'A run')._repr_html_()}</body></html>"
    page = opened(lesson)
    page.frames[1].wait_for_selector(".chosen")
    assert page.frames[1].evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 24, 27)"
    page.wait_for_function("document.querySelector('iframe').offsetHeight < 400")  # it has set its own height
