"""Users of the rest: a world model and its replay buffer, and programs that evolve."""
