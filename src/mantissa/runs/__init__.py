"""A run's folder and log, its screen, report and plots; several runs compared; the gap's page."""
