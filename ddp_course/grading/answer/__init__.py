"""How does a learner's answer run, when it may hang, crash or change its process?

Read it in this order: `isolated.py` (one run), `kept.py` (on which processes), `fences.py` (what is refused), `harm.py`
(whether the processes can be kept), `limits.py` (how long, how much), `execute.py` (a whole notebook).
"""
