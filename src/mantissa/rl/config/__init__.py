"""The run's configuration: its sections (``run``), what does not go together, how a recipe is read (``recipe``), and
the two-policy game's settings (``waltz``)."""
