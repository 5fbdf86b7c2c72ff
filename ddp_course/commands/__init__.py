"""What can be asked for from a terminal? A file for each word of `ddp-course`; see `cli.py`."""
