"""The same recipe on a cluster: verl's configuration, submitted as a Ray job, and what other people's overrides do."""

from mantissa.launch.check import Report, check_verl
from mantissa.launch.export import export
from mantissa.launch.options import LaunchOptions, launch_file, load_options
from mantissa.launch.plan import Override, Plan, Remark, Variable

__all__ = [
    "LaunchOptions",
    "Override",
    "Plan",
    "Remark",
    "Report",
    "Variable",
    "check_verl",
    "export",
    "launch_file",
    "load_options",
]
