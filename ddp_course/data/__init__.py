"""Which sample does each rank train on? Read `sampler.py`, then `permutation.py`."""
