"""What everything stands on: errors, bounds of untrusted input, configuration, files and rows, the one HTTP client,
the processes of a run, seeds."""
