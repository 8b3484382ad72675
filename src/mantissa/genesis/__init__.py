"""Users of the rest: a world model and its replay buffer, programs that evolve, and the game of two policies."""
