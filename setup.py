"""Has the wheel carry the folder recipes/ as mantissa/recipes; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = Path(__file__).parent / "recipes"


class BuildWithRecipes(build_py):
    """An editable install needs no copy: there the package finds the folder itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(RECIPES, Path(self.build_lib) / "mantissa" / "recipes", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithRecipes})
