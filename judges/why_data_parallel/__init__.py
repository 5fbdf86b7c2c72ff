"""The exercises of lesson 01: when is a mean of gradients the gradient, and what does a rank have to hold?

Two are about numbers alone, and run in one process. The one between them runs on ranks.
"""

from judges.why_data_parallel.exact import EXACT
from judges.why_data_parallel.fit import FIT
from judges.why_data_parallel.whole import WHOLE

EXERCISES = (WHOLE, EXACT, FIT)

__all__ = ["EXACT", "EXERCISES", "FIT", "WHOLE"]
