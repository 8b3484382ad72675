"""Exact kernels in a run: their plan, the check of their promise, the replay of what breaks it, an engine's twin."""
