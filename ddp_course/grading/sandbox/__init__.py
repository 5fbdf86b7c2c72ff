"""How is a stranger's notebook graded safely? It runs in a box, the judge sits outside, plain data crosses the border.

Read it in this order: `box.py` (the box), `boxed.py` (a notebook in it), `inside.py` (what happens in the box),
`protocol.py` (what crosses the border), `outside.py` (the judge).
"""
