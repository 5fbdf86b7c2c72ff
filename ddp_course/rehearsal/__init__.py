"""A learner's own program, read (`lint.py`) and rehearsed (`rehearse.py`) before it is given to many GPUs."""
