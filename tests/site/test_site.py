"""Is the site whole: each link, each picture's text, no error in the browser, no page that a phone must push aside?"""

import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.notebooks.test_browser import BROWSER_FLAGS, browser_path  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[2]
MEGABYTES = 30
AS_IT_IS = ("code", "pre", "script", "style")
RAW = re.compile(r".*\]\(.*|.*\|---.*|Return type.*|Alias for field.*")  # the last two: of docstrings, read wrongly
pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make site` builds it; Sphinx itself refuses links that lead nowhere."""
    folder = tmp_path_factory.mktemp("site")
    command = re.search(r"-m sphinx (.*) -d \S+ (.*) out/site$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    options = [*command[1].split(), "-d", str(folder / "doctrees"), *command[2].split(), str(folder / "site")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "site"


class Links(HTMLParser):
    """The pictures without a text of a page, where its links lead, what they may lead to, and its raw Markdown."""

    def __init__(self, page: Path):
        super().__init__()
        self.nameless, self.links, self.names = [], [], set()
        self.raw, self.as_it_is = [], 0
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.names |= {found.get("id"), found.get("name")}
        if tag == "img" and not found.get("alt"):
            self.nameless.append(found.get("src"))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        self.as_it_is += tag in AS_IT_IS

    def handle_endtag(self, tag):
        self.as_it_is -= tag in AS_IT_IS

    def handle_data(self, data):
        if not self.as_it_is:
            self.raw += RAW.findall(data)


def test_every_link_inside_leads_somewhere_and_every_picture_has_a_text(site):
    pages = {page: Links(page) for page in site.rglob("*.html") if "_static" not in page.parts}
    assert len(pages) > 50
    assert {page.name: links.nameless for page, links in pages.items() if links.nameless} == {}
    assert {page.name: links.raw for page, links in pages.items() if links.raw} == {}
    broken = []
    for page, found in pages.items():
        for link in found.links:
            target, _, name = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            there = (page.parent / target).resolve() if target else page
            if not there.exists() or name and there in pages and name not in pages[there].names:
                broken.append((page.relative_to(site).as_posix(), link))
    assert broken == []


def test_it_answers_what_people_look_for_and_is_not_large(site):
    assert sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) < MEGABYTES * 2**20
    text = {
        name: (site / name).read_text() for name in ("docs/made/errors.html", "docs/reference.html", "docs/teach.html")
    }
    assert "Expected to have finished reduction in the prior iteration" in text["docs/made/errors.html"]
    assert "which ranks must call the" in text["docs/reference.html"] and "make grade" in text["docs/teach.html"]
    assert 'href="#fault-skipped-collective"' in text["docs/made/errors.html"]
    glossary, sheet = ((site / f"docs/{name}.html").read_text() for name in ("glossary", "cheatsheet"))
    assert "15_fault_tolerance.html#with-a-different-number-of-ranks" in sheet.partition('id="save-and-resume"')[2]
    # A term's lesson is the first that has it in bold, not the first that has it at all, which is 00.
    assert re.search(r"and in which order\. <a [^>]*05_samplers\.html", glossary)
    assert re.search(r"Bytes a second [^<]*<a [^>]*04_collectives\.html", glossary)
    checkpoint = (site / "docs/made/checkpoint.html").read_text()
    assert re.search(r'reference\.html#what-collective-means"><span[^>]*>Collective:</span></a> one gather', checkpoint)
    assert "ddp-course lab" in (site / "docs/install.html").read_text()
    lesson = (site / "notebooks" / "04_collectives.html").read_text()
    assert 'href="../docs/glossary.html#term-collective"' in lesson
    exercise = (site / "exercises/07_gradient_bucketing/07_gradient_bucketing.html").read_text()
    assert exercise.count("<summary>Hint</summary>") == 4


def test_the_home_page_shows_the_courses_own_lines_report_and_sums(site):
    page = (site / "docs/index.html").read_text("utf-8")
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    added = re.findall(r"^\+ (.*)$", text, re.MULTILINE)
    after = (ROOT / "programs/ddp.py").read_text()
    assert len(added) >= 6 and all(line in after for line in added)
    assert re.search(r"^- sampler = RandomSampler.*\n\+ sampler = DistributedSampler", text, re.MULTILINE)
    assert "rank 2 never entered all_reduce #3" in text and "Every rank must call every collective." in text
    sums = re.findall(r'class="full[^"]*"[^>]*><rect [^>]*/><text [^>]*>(\d+)<', page)
    assert sums == ["11", "9", "12", "10"] * 4  # of (1, 2, 3, 4), (5, 1, 2, 2), (2, 4, 1, 3) and (3, 2, 6, 1)


WINDOWS = [(400, "light"), (900, "dark"), (1500, "light")]


def test_pages_open_without_an_error_and_fit_the_window(site, browser_path):  # noqa: F811
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    errors, wide = [], []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path, args=BROWSER_FLAGS)
        page = browser.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "requestfailed", lambda request: errors.append(request.url) if request.url.startswith("file:") else None
        )
        for path in sorted(site.rglob("*.html")):
            if "_static" in path.parts or path == site / "index.html":  # which only leads on
                continue
            page.goto(path.as_uri(), wait_until="load")
            for width, scheme in WINDOWS:
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                page.evaluate("window.scrollTo(500, 0)")
                if page.evaluate("window.scrollX"):
                    wide.append((path.relative_to(site).as_posix(), width))
        browser.close()
    assert errors == [] and wide == []
