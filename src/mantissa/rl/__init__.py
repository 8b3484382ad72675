"""The run: configuration, collecting, one step in five calls, the loop, probes, resume."""

from mantissa.rl import waltz  # noqa: F401 - a kind of run, which registers itself
from mantissa.rl.config.run import RunConfig, load_recipe, make_config
from mantissa.rl.session import resume, resumed_config, start

__all__ = ["RunConfig", "load_recipe", "make_config", "resume", "resumed_config", "start"]
