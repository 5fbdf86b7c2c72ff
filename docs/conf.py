"""How is the site built? `make site`: lessons with their stored outputs, exercises, the reference, the errors.

No lesson is run. A link that leads nowhere is an error. Read next: `pages.py`, the pages that are made of the package.
"""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import core  # noqa: E402
import front  # noqa: E402
import pages  # noqa: E402

project, author = "The DDP course", "The DDP course authors"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/*.ipynb", "notebooks/images/*", "exercises/**", "*.md"]
exclude_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "INSTRUCTORS.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "exercises/GENERATED_FROM_SOLUTIONS.md",
    "docs/static/**",
    "**/.ipynb_checkpoints",
]

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # an output may be a table
myst_enable_extensions = ["colon_fence", "dollarmath", "amsmath"]
myst_heading_anchors = 3
# A notebook may begin at any depth, and shows one cell's magic words as they are.
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["static"]
html_css_files = ["course.css"]
html_extra_path = ["root"]
html_copy_source = False
smartquotes = False  # an option has two dashes
html_theme_options = {
    "show_navbar_depth": 1,
    "use_download_button": False,
    "show_toc_level": 2,
    "navbar_persistent": [],
}
# Where GitHub builds the site, it says whose repository it is; each lesson then has buttons for Binder and Colab.
if repository := os.environ.get("GITHUB_REPOSITORY"):
    html_theme_options |= {
        "repository_branch": "main",
        "repository_url": f"https://github.com/{repository}",
        "launch_buttons": {
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
            "notebook_interface": "jupyterlab",
        },
    }


def setup(app):
    """Write the pages that are made of the package, link terms to the glossary, and describe pictures."""
    for name, made in {"changes.diff": front.changes, "hang.txt": front.hang, "ring.svg": front.ring}.items():
        pages.write(DOCS / "made" / name, made())
    pages.write_errors(DOCS / "made" / "errors.md")
    pages.write_reference(DOCS / "made")
    core.write_chapters(DOCS / "made" / "core")
    app.connect("autodoc-process-docstring", pages.read_docstring, priority=400)  # before napoleon
    app.connect("doctree-read", pages.describe_pictures)
    app.connect("doctree-read", pages.link_terms)
    app.connect("source-read", pages.link_lessons)
    return {"parallel_read_safe": True}
