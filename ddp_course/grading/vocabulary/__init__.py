"""In which words does a judge say what an answer has to do?

Read it in this order: `expect.py` (what is expected), `play.py` (a round on ranks), `tasks.py` (what is trained),
`observe.py` and `noted.py` (what is noted meanwhile), `compare.py` (how results are compared), `provenance.py` (whose
numbers are in them), `means.py` (how means go wrong).
"""
