"""The exercise of lesson 13: a step that is right in one process, and wrong on ranks, with no error."""

from judges.silent_errors.forwards import FORWARDS

EXERCISES = (FORWARDS,)
