"""``mantissa serve``: a vLLM server that samples for runs of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.cli import Overrides, recipe_there


def serve(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="The recipe of the runs that will use it.", callback=recipe_there)
    ],
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; who reaches it and has the key can run code here.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    folder: Annotated[
        str | None,
        typer.Option(help="An empty folder for weights, which the runs see too; a temporary one where not given."),
    ] = None,
) -> None:
    """Start vLLM's server with the recipe's shape and formats, for runs that set rollout.vllm.server to its URL.

    It runs until Ctrl-C, beside one run after another. A run checks its formats and every weight it sends.

    [bold]Examples[/]

    mantissa serve recipes/demo.yaml precision=bf16

    mantissa train recipes/demo.yaml precision=bf16 rollout.engine=vllm rollout.vllm.server=http://127.0.0.1:8000
    """
    from mantissa.rollout import require_vllm

    require_vllm()
    from mantissa.base.ranks import choose_device
    from mantissa.kernels import resolve
    from mantissa.rl import load_recipe
    from mantissa.rl.engines import serve_engine
    from mantissa.rl.policy import load_policy
    from mantissa.rollout.vllm.key import key_path
    from mantissa.tasks import build_task

    config = load_recipe(recipe, [*(overrides or []), "rollout.engine=vllm"])
    device = choose_device(config.device)
    policy, _ = load_policy(config.model, build_task(config.task, config.seed), config.seed)
    asked = config.precision.of_layers(policy.config.num_hidden_layers)
    precision = resolve(asked, device, reference=config.algorithm.reference is not None)

    def ready(url: str) -> None:
        say(f"key: {key_path(port)}; elsewhere than here set VLLM_API_KEY to what it holds")
        say(f"ready: mantissa train {recipe} ... rollout.engine=vllm rollout.vllm.server={url}")

    code = serve_engine(
        config.rollout, precision, policy.config, device, host=host, port=port, folder=folder, ready=ready
    )
    if code:
        raise MantissaError(f"vLLM's server ended with exit code {code}; its own messages above say why")
