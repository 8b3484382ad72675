"""What observes a step between scoring and learning, through one interface; none changes a bit of the run."""
