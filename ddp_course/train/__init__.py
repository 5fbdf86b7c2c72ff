"""Reinforcement learning on several ranks, for lesson 19: `rollouts.py`, then `policy.py`."""
