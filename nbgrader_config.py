"""nbgrader's settings for this course: `nbgrader` and formgrader read this file when started in this folder.

`make grade SUBMISSIONS=folder` grades a class without any of nbgrader's own commands; see INSTRUCTORS.md.
"""

import os

from ddp_course.grading.paths import need_nbgrader

need_nbgrader()
c = get_config()  # noqa: F821  (traitlets puts it here)

c.CourseDirectory.root = os.path.dirname(os.path.abspath(__file__))
c.CourseDirectory.course_id = "ddp_course"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "exercises"
c.CourseDirectory.submitted_directory = "submitted"
# Where `make grade` writes.
c.CourseDirectory.db_url = f"sqlite:///{c.CourseDirectory.root}/class/gradebook.db"
c.CourseDirectory.autograded_directory = "class/autograded"
c.CourseDirectory.feedback_directory = "class/feedback"
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc*", "__pycache__"]

# Test cells that were changed are put back; `restore.py` has done most of it.
c.OverwriteCells.add_missing_cells = True
c.Autograde.sanitize_preprocessors = [
    "nbgrader.preprocessors.ClearOutput",
    "nbgrader.preprocessors.DeduplicateIds",
    "nbgrader.preprocessors.OverwriteKernelspec",
    "nbgrader.preprocessors.OverwriteCells",
    "nbgrader.preprocessors.CheckCellMetadata",
]
# Cells run in a box, and the judge is outside.
c.Autograde.autograde_preprocessors = [
    "ddp_course.grading.instructor.autograder.BoxedExecute",
    "nbgrader.preprocessors.IgnorePattern",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]
