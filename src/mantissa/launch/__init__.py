"""The same recipe on a cluster: verl's configuration, submitted as a Ray job, and what other people's overrides do."""

from mantissa.launch.check import Report, check_verl
from mantissa.launch.export import Plan, export
from mantissa.launch.options import LaunchOptions, launch_file, load_options

__all__ = ["LaunchOptions", "Plan", "Report", "check_verl", "export", "launch_file", "load_options"]
