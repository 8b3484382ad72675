"""Mantissa: reinforcement learning of language models in the precision you choose for each role.

Importing this package is cheap: rooms are imported by name (``mantissa.precision``, ``mantissa.rollout``, ...).
"""

__version__ = "0.1.0"
