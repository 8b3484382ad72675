"""The run: configuration, experience, learner, warm start, the loop, resume."""

from mantissa.rl.config import RunConfig
from mantissa.rl.recipe import load_recipe, make_config
from mantissa.rl.session import resume, resumed_config, start

__all__ = ["RunConfig", "load_recipe", "make_config", "resume", "resumed_config", "start"]
