"""The warm start that the cells of a seed share, made in a process of its own: ``RECIPE FOLDER``.

What ``mantissa train`` does before RL begins, in fp32; the policy is then written as a model's folder, whole or not at
all, and each cell begins from it.
"""

from mantissa.base.environ import end_with_launcher

end_with_launcher()  # before imports that take seconds

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from mantissa.base.errors import MantissaError, say  # noqa: E402
from mantissa.rl.assemble import assemble  # noqa: E402
from mantissa.rl.config.run import load_recipe  # noqa: E402
from mantissa.rl.session import warm_start  # noqa: E402


def _said(row: dict[str, float]) -> None:
    say("  ".join(f"{name.removeprefix('warm_start/')} {value:.4g}" for name, value in row.items()))


def main(recipe: str, folder: str) -> None:
    """Make it and write it to ``folder``; each evaluation is a line on stdout."""
    config = load_recipe(recipe)
    assert config.warm_start is not None
    parts = assemble(config)
    try:
        params = parts.sampler.params_of(config.rollout)
        warm_start(parts, config.warm_start, params, _said)
    finally:
        parts.close()
    parts.save(Path(folder))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except MantissaError as error:
        say(f"mantissa: error: {error}", err=True)
        sys.exit(2)
