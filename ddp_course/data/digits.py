"""Where do the handwritten digits come from, and which of them are for the test?

scikit-learn ships them: a line for each image, 64 pixels and the label. The file is read without importing
scikit-learn, which would cost every rank two seconds. Which rows are for training and which for the test, and in which
order, is stored beside this file. It was chosen once, with the same share of each digit in both, and never changes:
nobody should test on rows that somebody else trained on.

Left out on purpose: pixels as floating point numbers; see `Images`.
Read next: `datasets.py`.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ddp_course.data.downloads import DatasetError

SPLIT = Path(__file__).with_name("digits_split.json")
INSIDE = Path("datasets", "data", "digits.csv.gz")  # below scikit-learn's folder
CLASSES = tuple("0123456789")
WHITE = 16


def read_digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels (N, 8, 8) and labels (N,) of one split, as bytes, in its order.

    Raises:
        DatasetError: scikit-learn is not installed, or has no such file.
    """
    found = find_spec("sklearn")
    if found is None or not found.origin:
        raise DatasetError("the digits come with scikit-learn, which is not installed; run `make env`")
    path = Path(found.origin).parent / INSIDE
    try:
        lines_NP = np.loadtxt(path, delimiter=",", dtype=np.uint8)  # P: 64 pixels, then the label
    except (OSError, ValueError) as error:
        raise DatasetError(f"the digits cannot be read from {path} ({error}); run `make env` again") from error
    rows = json.loads(SPLIT.read_text())[split]
    return lines_NP[rows, :-1].reshape(-1, 8, 8), lines_NP[rows, -1]
