"""How the tests run: several at a time, and on a machine where a lesson has passed, not again until it changes."""

import os
import sys
from pathlib import Path

pytest_plugins = ("tests.in_parallel", "tests.unchanged", "tests.warm.plugin")

# A lesson's `!torchrun` finds this Python's, also where its environment was not activated.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
