"""What goes wrong, provoked on purpose: `ddp-course faults` lists it, `catalogue.py` has it in order."""
