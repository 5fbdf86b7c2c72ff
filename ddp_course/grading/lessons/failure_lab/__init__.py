"""The exercises of lesson 12: reading what ranks say, mending a validation, uneven inputs, recorded collectives.

Read next: `last_words.py`, where the failures come from.
"""

from ddp_course.grading.lessons.failure_lab.reading import READING
from ddp_course.grading.lessons.failure_lab.records import RECORDS
from ddp_course.grading.lessons.failure_lab.uneven import UNEVEN
from ddp_course.grading.lessons.failure_lab.validation import VALIDATION

EXERCISES = (READING, VALIDATION, UNEVEN, RECORDS)
