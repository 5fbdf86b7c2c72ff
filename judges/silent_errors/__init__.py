"""The exercises of lesson 13: what is right in one process, and wrong on ranks, with no error."""

from judges.silent_errors.comparing import COMPARING
from judges.silent_errors.forwards import FORWARDS

EXERCISES = (FORWARDS, COMPARING)
