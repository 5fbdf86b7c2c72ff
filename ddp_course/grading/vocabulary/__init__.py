"""In which words does a judge say what an answer has to do?

Read it in this order: `play.py` (a round on ranks), `observe.py` and `noted.py` (what is noted meanwhile), `tasks.py`
(what is trained), `compare.py` (how results are compared), `talks.py` (a view of collectives).
"""
