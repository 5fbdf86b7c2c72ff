"""The exercises of lesson 12: reading what ranks say, fixing a validation, uneven inputs, recorded collectives.

Read next: `reading.py`.
"""

from judges.failure_lab.reading import READING
from judges.failure_lab.records import RECORDS
from judges.failure_lab.uneven import UNEVEN
from judges.failure_lab.validation import VALIDATION

EXERCISES = (READING, VALIDATION, UNEVEN, RECORDS)
