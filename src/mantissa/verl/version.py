"""Which verl the plugin is for.

verl says of its engine's interface that it may change, and swallows what a plugin raises as verl is imported. So the
version is checked where the parts are imported by name (``model.external_lib``), and there an error ends the job.
"""

from __future__ import annotations

import importlib.metadata

from mantissa.base.errors import MantissaError

SUPPORTED = "0.9"  # major.minor; 0.9.1 is the one that is tested


def check_version() -> str:
    """The installed verl's version. ``MantissaError`` where there is none, or one whose plugin points differ."""
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise MantissaError(
            'mantissa.verl: verl is not installed here; install it with "pip install mantissa-rl[verl]"'
        ) from None
    if ".".join(version.split(".")[:2]) != SUPPORTED:
        raise MantissaError(
            f"mantissa.verl: verl {version} is installed: expected {SUPPORTED}.x, with whose platforms, engines and "
            "rollouts this plugin registers (0.8 and older have no platforms to register); "
            'install "verl==0.9.1", or another version of mantissa-rl'
        )
    return version
