"""In which words does a judge say what an answer has to do?

Read it in this order: `rounds.py` (a round on ranks), `observe.py` and `seen_samples.py` (what is noted
meanwhile), `tasks.py` (what is trained), `compare.py` (how results are compared), `communication.py` (a view of
collectives).
"""
