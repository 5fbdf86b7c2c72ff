"""The course says things as people say them: words that sounded translated to its readers do not come back."""

import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Each is a word, or the beginning of one, and a turn of phrase is whole.
AVOIDED = re.compile(r"\b(?:shal[l]|ane[w]|foretel[l]|men[d](?:s|ed|ing)?|as dea[r]|held agains[t]|in good orde[r])\b")
READ = (".py", ".md", ".ipynb", ".j2", ".html", ".sbatch", ".toml", ".yaml", ".yml")


def test_no_file_uses_them():
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    found = []
    for path in (ROOT / name for name in kept.splitlines() if Path(name).name == "Makefile" or name.endswith(READ)):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":  # what a network has written counts for nothing
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in AVOIDED.finditer(text)]
    assert not found, "\n".join(found)
