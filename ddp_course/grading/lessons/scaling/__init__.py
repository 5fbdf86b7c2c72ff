"""The exercises of this lesson."""

EXERCISES = ()
