"""The exercises of lesson 12: reading what ranks say, fixing a validation, and uneven inputs.

Read next: `reading.py`.
"""

from judges.failure_lab.reading import READING
from judges.failure_lab.uneven import UNEVEN
from judges.failure_lab.validation import VALIDATION

EXERCISES = (READING, VALIDATION, UNEVEN)
