"""The run's configuration: its sections (``sections``), what does not go together and how a recipe is read (``run``),
and the two-policy game's settings (``waltz``)."""
