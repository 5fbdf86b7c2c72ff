"""What does a learner need beside the notebook: a copy to work on, a check in the terminal, hints, points so far?"""
