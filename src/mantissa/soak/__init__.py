"""``mantissa soak``: evolution, replay buffer and world model under load, with faults, and an account of it."""

from mantissa.soak.job import SIZES
from mantissa.soak.load import FAULTS, SoakConfig, run_soak
from mantissa.soak.report import Report, write_report

__all__ = ["FAULTS", "SIZES", "Report", "SoakConfig", "run_soak", "write_report"]
