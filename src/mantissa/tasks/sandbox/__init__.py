"""Running programs of a policy where they can do no harm."""
