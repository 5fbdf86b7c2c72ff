"""How does a learner's answer run, when it may hang, crash or change its process?

Read it in this order: `isolated.py` (one run), `worker_pool.py` (on which processes), `forbidden.py` (what is
refused), `process_changes.py` (whether the processes can be kept), `limits.py` (how long, how much), `execute.py` (a
whole notebook).
"""
