"""What verl's own configuration holds, and what hydra makes of overrides to it: asked of hydra, in verl's environment.

``make facts`` writes both as data: the tree of each version, of which ``mantissa check`` is made, and hydra's verdict
on the overrides of public scripts (``tests/data/verl_overrides.json``), with which a test compares the check's.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GROUPS = ("dp", "megatron", "torchtitan", "veomni")
# Configurations of verl's other trainers, which begin with the first one's, by the folder beside verl/trainer.
TRAINERS = {
    f"{name}_ppo_{group}trainer": f"experimental/{folder}/config"
    for name, folder in (("one_step_off", "one_step_off_policy"), ("fully_async", "fully_async_policy"))
    for group in ("", "megatron_")
}
TREE = Path(__file__).parents[2] / "src" / "mantissa" / "launch" / "verl_tree.json"
CORPUS = Path(__file__).parents[1] / "data" / "verl_overrides.json"


def installed() -> tuple[str, Path]:
    """The version of verl that is installed here, and the folder of its configuration."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("verl is not installed here: run this in .venv-verl-VERSION (make facts)")
    return importlib.metadata.version("verl"), Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def composed(folder: Path, overrides: list[str], name: str = "ppo_trainer") -> Any:
    """The configuration that hydra composes, as OmegaConf holds it."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(folder), version_base=None):
        return compose(name, overrides)


def tree_of(folder: Path) -> dict[str, Any]:
    """Key to default for every model engine: what all share under ``common``, what one has besides under its name.
    ``nulls``: keys whose default is a reference that resolves to null. ``trainers``: what other trainers'
    configurations have besides, or otherwise."""
    flat, nulls = {}, {}
    for group in (group for group in GROUPS if (folder / "model_engine" / f"{group}.yaml").is_file()):
        config = composed(folder, [f"model_engine={group}"])
        flat[group] = dict(_leaves(_plain(config)))
        nulls[group] = [key for key, value in flat[group].items() if _refers(value) and _is_null(config, key)]
    first, *others = flat.values()
    common = {k: v for k, v in first.items() if all(k in o and o[k] == v for o in others)}
    own = {group: {k: v for k, v in tree.items() if k not in common} for group, tree in flat.items()}
    trainers = {}
    for name, where in TRAINERS.items():
        place, base = folder.parents[1] / where, flat["megatron" if "megatron" in name else "dp"]
        if (place / f"{name}.yaml").is_file():
            whole = dict(_leaves(_plain(composed(place, [f"hydra.searchpath=[file://{folder}]"], name))))
            assert not base.keys() - whole.keys(), f"{name} takes keys away"
            trainers[name] = {key: value for key, value in whole.items() if key not in base or base[key] != value}
    return {"common": common, "engines": own, "nulls": nulls, "trainers": trainers}


def _plain(config: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=False)


def _leaves(tree: dict[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{under}{name}.")
        else:
            yield under + str(name), value


def _refers(value: object) -> bool:
    return isinstance(value, str) and "${" in value


def _is_null(config: Any, key: str) -> bool:
    from omegaconf import OmegaConf

    return OmegaConf.select(config, key, throw_on_missing=False) is None


def accepted(folder: Path, group: str, overrides: list[str]) -> list[bool]:
    """Of each override, in their order, whether hydra takes it; one that it refuses changes nothing."""
    return accepted_by(composed(folder, [f"model_engine={group}"]), overrides)


def accepted_by(config: Any, overrides: list[str]) -> list[bool]:
    """The same, of a configuration that is composed already, which is left as it is."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    parser, taken, found = OverridesParser.create(), [], []
    now = copy.deepcopy(config)
    for text in overrides:
        try:
            override = parser.parse_override(text)
            ConfigLoaderImpl._apply_overrides_to_config([override], now)
            taken.append(override)
            found.append(True)
        except (HydraException, OmegaConfBaseException, AssertionError):
            now = copy.deepcopy(config)  # what was refused may have left half of itself
            ConfigLoaderImpl._apply_overrides_to_config(taken, now)
            found.append(False)
    return found


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for version in after:
        old, new = (dict(_leaves(tree.get(version, {}))) for tree in (before, after))
        yield from (f"{version} {key}: {old.get(key)} -> {new.get(key)}" for key in sorted(old | new)
                    if old.get(key) != new.get(key))  # fmt: skip


def write(path: Path, data: object) -> None:
    """A line for each key, so that a change reads as one."""
    path.write_text(json.dumps(data, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Write the trees of the verl that is installed and of those unpacked at ``VERSION=FOLDER``; judge the corpus."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("others", nargs="*", metavar="VERSION=FOLDER", help="unpacked wheels of other versions")
    version, folder = installed()
    folders = {version: folder} | {
        one.partition("=")[0]: Path(one.partition("=")[2]) / "verl" / "trainer" / "config"
        for one in parser.parse_args().others
    }
    before = json.loads(TREE.read_text()) if TREE.is_file() else {}
    after = before | {one: tree_of(where) for one, where in sorted(folders.items())}
    print("\n".join(_changed(before, after)) or "nothing changed")
    write(TREE, after)
    if CORPUS.is_file():
        corpus = json.loads(CORPUS.read_text())
        bases = {group: composed(folder, [f"model_engine={group}"]) for group in GROUPS}
        for script in corpus["scripts"]:
            script["accepted"] = accepted_by(bases[script["engine"]], script["overrides"])
        write(CORPUS, corpus | {"verl": version})


if __name__ == "__main__":
    main()
