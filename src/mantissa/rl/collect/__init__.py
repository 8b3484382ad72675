"""From a position in the data to the graded batch of one step, in turn with learning or ahead of it."""
