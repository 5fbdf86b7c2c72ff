"""How does an instructor hand out the exercises and grade a class? All of it needs nbgrader.

Read it in this order: `release.py` (the exercises, made from the solutions), `restore.py` (what is taken of a
submission), `classroom.py` and `autograder.py` (one submission), `whole_class.py` (all), `marks.py` and
`class_report.py` (what comes out).
"""
