"""From a recipe to what verl is to be told: ``export(config, options)``."""

from __future__ import annotations

from mantissa.launch.export_algorithm import algorithm
from mantissa.launch.export_precision import precision
from mantissa.launch.export_run import run
from mantissa.launch.options import LaunchOptions
from mantissa.launch.plan import Draft, Plan
from mantissa.rl.config import RunConfig


def export(config: RunConfig, options: LaunchOptions) -> Plan:
    """Translate every field of a recipe to keys that this verl, with these engines, reads.

    Raises ``MantissaError`` with every reason at once where something that the recipe asks for would be ignored there,
    is hard-coded, or is beyond the hardware.
    """
    draft = Draft(config, options)
    precision(draft)
    algorithm(draft)
    run(draft)
    return draft.finish()
