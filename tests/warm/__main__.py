"""`python -m tests.warm FOLDER`, from the project's folder: serve until standard input ends."""

import sys
from pathlib import Path

from tests.warm.server import run, serve

run(serve(Path(sys.argv[1])))
