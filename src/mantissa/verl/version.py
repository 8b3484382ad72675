"""Which verl the plugin is for.

verl says of its engine's interface that it may change, and swallows what a plugin raises as verl is imported. So the
version is checked where the parts are imported by name (``model.external_lib``), and there an error ends the job.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator

from mantissa.base.errors import MantissaError

SUPPORTED = "0.9"  # major.minor
TESTED = ("0.9.0", "0.9.1")


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


@contextlib.contextmanager
def plugin_points() -> Iterator[None]:
    """Around the imports of the plugin's parts: a place in verl that another version has moved is one error."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        version = importlib.metadata.version("verl")
        raise MantissaError(
            f"mantissa.verl: verl {version} is not as the plugin knows it ({error}); it is tested with "
            f'{" and ".join(TESTED)}: install "verl=={TESTED[-1]}", or another version of mantissa-rl'
        ) from error
