"""A model of transformers as the policy that samples: its own code and cache, our sampler.

What our decoder does not know is sampled so: whole rows padded to the left, a token at a time from the model's cache,
each drawn by ``sampling.py`` from its own uniform. ``rl/score.py`` scores it (``forward_transformers``). With an
adopted model (``mantissa.adopt``) both give a token the same log-prob, to the last bit.

Legend: B rows, P prompt tokens, R response tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mantissa.adopted import Adopted
from mantissa.adopted.altered import Altered
from mantissa.base.errors import MantissaError
from mantissa.base.files import atomic_folder
from mantissa.base.hub import read_object
from mantissa.base.ranks import Ranks, shard
from mantissa.kernels import ResolvedRole
from mantissa.model import Tokenizer
from mantissa.precision import BF16, FP16, FP32, Fp8Policy, NumberFormat, round_to_format, token_logprob
from mantissa.rollout.engine import peak, require_held
from mantissa.rollout.generation import StopStrings
from mantissa.rollout.sampling import (
    Completion,
    FinishReason,
    Request,
    SamplingParams,
    filter_logits,
    request_keys,
    sample,
    uniforms,
)
from mantissa.rollout.support import MostProbable, Support, encode, most_probable


def load_transformers(folder: Path) -> Any:
    """The causal language model of a folder, by transformers' own code, in fp32 and eval mode.

    No code of the folder's own is run, no pickle read, nothing asked of a hub. ``MantissaError``: what transformers
    does not load so, or not whole: it would draw the weights that are missing; and values that are not finite.
    """
    read_object(folder / "config.json")  # whose errors here say more
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise MantissaError("transformers is not installed; pip install 'mantissa-rl[train]'") from None
    try:
        with _quietly():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, local_files_only=True,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # each model's own code, whose errors for a damaged folder are of every kind
        said = " ".join(str(error).split())
        raise MantissaError(
            f"{folder}: transformers does not load it ({type(error).__name__}: {said:.200}); {_AGAIN}"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise MantissaError(f"{folder}: {_some(missing)} missing, {missing[0]}; {_AGAIN}")
    check_held(dict(model.named_parameters()), str(folder), (FP32,))
    if left := sorted(found["unexpected_keys"]):
        warnings.warn(f"{folder}: {_some(left)} not the model's, and left out: {left[0]}", stacklevel=2)
    return model.eval()


_AGAIN = "fetch its files again, or check its config.json against its weights"


def _some(names: Sequence[str]) -> str:
    return "1 weight is" if len(names) == 1 else f"{len(names)} weights are"


def any_config(folder: Path) -> Any:
    """The configuration of a folder's language model, as transformers reads it, no code of the folder's own."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True).get_text_config()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Within this, transformers draws no bars and no reports, and torchao, which it imports, says nothing of itself."""
    from transformers.utils import logging as bars

    shown, others = bars.is_progress_bar_enabled(), [logging.getLogger(name) for name in _LOUD]
    levels = [logger.level for logger in others]
    bars.disable_progress_bar()
    for logger in others:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(others, levels, strict=True):
            logger.setLevel(level)
        if shown:
            bars.enable_progress_bar()


_LOUD = ("transformers", "torchao", "torch.utils._pytree")  # the last two speak where torchao is imported


def positions_of(model: Any) -> int:
    """Of the longest sequence; a million where its configuration does not say, as where positions are no embedding."""
    text = model.config.get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or 1 << 20)


def in_role(model: Any, role: ResolvedRole) -> TransformersPolicy:
    """The model as a role computes it: in a format of its own its parameters are cast, as a checkpoint is loaded in it
    (buffers stay); of fp8 and the scaled formats they are masters.

    ``MantissaError`` for kernels that transformers' own code does not have.
    """
    if role.emulation is not None or role.active not in (FP32, BF16, FP16):
        raise MantissaError(
            "this model runs by transformers' own code: in fp32, bf16, fp16, fp8 or a scaled format, or exact; a "
            "format of the dial and an engine's habits are for the families that our decoder knows"
        )
    for parameter in model.parameters() if role.fp8 is None else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(role.active.dtype)
    return TransformersPolicy(model, role.active, fp8=role.fp8)


def logprob_on(device: torch.device) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Log-probs of tokens in one order for every row: on a GPU torch's own sums depend on how a row lies."""
    if device.type != "cuda":
        return token_logprob
    from mantissa.kernels.triton import rows

    return rows.token_logprob


@dataclass(frozen=True)
class Shape:
    """What the loop asks of a policy's configuration."""

    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    text_config: Any  # transformers' own
    weights_note: str = ""


class TransformersPolicy(nn.Module):
    """A policy by transformers' own code, in the place of our decoder: computed in ``fmt``.

    ``adopted``: by whose exact kernels it computes. None: by torch's own; fp32 masters of another format are cast where
    they are used, so that its numbers are those of the model loaded in that format, and with ``fp8`` its products have
    operands as that says. Modules and parameters have transformers' own names.
    """

    lora = None  # adapters of ours are for our decoder

    def __init__(
        self, model: Any, fmt: NumberFormat, adopted: Adopted | None = None, fp8: Fp8Policy | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.format, self.adopted = model.eval(), fmt, adopted
        text = model.config.get_text_config()
        self.config = Shape(text.vocab_size, text.num_hidden_layers, positions_of(model), model.config)
        plain = fp8 is None and next(model.parameters()).dtype is fmt.dtype
        self._altered = None if plain or adopted is not None else Altered(model, fmt, fp8)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The model's, without this wrapper: torch names parameters and buffers by them too."""
        return self.model.named_modules(*args, **kwargs)

    def forward(self, **given: Any) -> Any:
        """As the model's own."""
        if self._altered is None:
            return self.model(**given)
        with _inside(self.model, self._altered):
            return self.model(**given)

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Within this, no weight changes: what is made of one is made once."""
        mode = self.adopted or self._altered
        return contextlib.nullcontext() if mode is None else mode.keeping()


@contextlib.contextmanager
def _inside(model: nn.Module, mode: Altered) -> Iterator[None]:
    """Within this the model's own forward runs in ``mode``, and what is hung around it does not: FSDP2's hooks there
    ask parameters for their dtype."""
    with contextlib.ExitStack() as entered:

        def enter(*_: Any) -> None:
            entered.enter_context(mode)

        handles = [
            model.register_forward_pre_hook(enter),
            model.register_forward_hook(lambda *_: entered.close(), prepend=True, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class CopiedTransformers:
    """A policy that does not train: a copy of ``policy`` in a role, of the masters that ``take`` is given.

    Of an adopted policy the copy computes by the same exact kernels.
    """

    def __init__(self, policy: TransformersPolicy, role: ResolvedRole) -> None:
        model = copy.deepcopy(policy.model).requires_grad_(False)
        if policy.adopted is not None:
            policy.adopted.knows(model)
        self.decoder = TransformersPolicy(model, role.active, policy.adopted, role.fp8)

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is kept, by parameter name: fp32, rounded where it is used."""
        return {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}

    def take(self, masters: Mapping[str, Tensor]) -> None:
        """Become a copy of the policy with these masters. ``MantissaError``: one that the format cannot hold."""
        taken(self.weights, masters, "reference", (self.decoder.format,))

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """There is room."""


@torch.no_grad()
def taken(kept: Mapping[str, Tensor], masters: Mapping[str, Tensor], who: str, formats: Iterable[NumberFormat]) -> None:
    """Copy masters, each rounded once to the dtype of what is kept. ``MantissaError``: other names, or a value that is
    not finite in one of the formats that they are computed in; then nothing is copied."""
    if set(masters) != set(kept):
        raise MantissaError(f"{who}: expected the {len(kept)} weights of the policy, got {len(masters)}")
    check_held(masters, who, formats)
    for name, master in masters.items():
        kept[name].copy_(master)


@torch.no_grad()
def check_held(weights: Mapping[str, Tensor], who: str, formats: Iterable[NumberFormat]) -> None:
    """``MantissaError`` naming the first weight with a value that one of the formats cannot hold, and the value."""
    some = {name: weight for name, weight in weights.items() if weight.is_floating_point() and weight.numel()}
    peaks = torch.stack([peak(weight.float()) for weight in some.values()]).cpu()
    for fmt in dict.fromkeys(formats):
        for name, own, rounded in zip(some, peaks.tolist(), round_to_format(peaks, fmt).tolist(), strict=True):
            require_held(who, name, own, rounded, fmt)


class TransformersEngine:
    """Samples from ``model`` as it is at that moment, a learner's own too; with ``adopted`` by its exact kernels.

    ``model``: transformers' own, or a ``TransformersPolicy``.
    ``slots``: rows at a time. ``decode_text``: for stop strings.
    """

    def __init__(
        self,
        model: Any,
        adopted: Adopted | None = None,
        slots: int = 64,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.model, self.slots, self.decode_text = model, slots, decode_text
        policy = model if isinstance(model, TransformersPolicy) else None
        keeper = policy or adopted
        self._keeping = contextlib.nullcontext if keeper is None else keeper.keeping
        self.device = next(model.parameters()).device
        self.version = 0  # of the weights, as their owner counts
        self.interrupted: Callable[[], bool] = lambda: False  # asked before every token of ``generate``
        own = type(model if policy is None else policy.model)
        forwards = (vars(kind)["forward"] for kind in own.__mro__ if "forward" in vars(kind))
        forward = next(of for each in forwards if "input_ids" in (of := inspect.signature(each).parameters))
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in forward else {}

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Completions of each request, in order, under the weights of ``version``. ``MantissaError``: a log-prob is
        not finite, or there are stop strings and nothing decodes text."""
        if params.stop and self.decode_text is None:
            raise MantissaError("stop strings need the tokenizer: give the engine decode_text")
        prompts = [request.prompt_tokens for request in requests for _ in range(request.samples)]
        keys = request_keys(requests)
        completions: list[Completion] = []
        with self._keeping(), torch.no_grad():
            for start in range(0, len(prompts), self.slots):
                rows = slice(start, start + self.slots)
                completions += self._batch(prompts[rows], keys[rows], params, version)
        each = iter(completions)
        return [[next(each) for _ in range(request.samples)] for request in requests]

    def _batch(
        self, prompts: Sequence[Sequence[int]], keys_B: Tensor, params: SamplingParams, version: int
    ) -> list[Completion]:
        tokens_BP, mask = _padded(prompts, self.device)
        fed, cache, keys_B = tokens_BP, None, keys_B.to(self.device)
        rows = [_Row(params, self.decode_text) for _ in prompts]
        for at in range(params.max_tokens):
            if self.interrupted():
                for row in rows:
                    row.reason = row.reason or "abort"
                break
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -fed.shape[1] :]
            out = self.model(
                input_ids=fed, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                **self._last,
            )  # fmt: skip
            token_B = self._draw(rows, out.logits[:, -1].float(), params, uniforms(keys_B, torch.full_like(keys_B, at)))
            if all(row.reason for row in rows):
                break
            fed, cache, mask = token_B.unsqueeze(1), out.past_key_values, torch.cat((mask, mask[:, :1] * 0 + 1), 1)
        return [row.completion(version, key) for row, key in zip(rows, keys_B.tolist(), strict=True)]

    def _draw(self, rows: Sequence[_Row], logits_BV: Tensor, params: SamplingParams, uniform_B: Tensor) -> Tensor:
        """A token of each row, taken by those that are not finished."""
        kept_BV = filter_logits(logits_BV, params)
        unfiltered = replace(params, top_k=0, top_p=1.0)
        token_B, logp_B = sample(kept_BV, unfiltered, uniform_B, logprob_on(self.device))
        supports: Sequence[Any] = [None] * len(rows)
        tops: Sequence[Any] = supports
        if params.temperature > 0:
            supports = supports if kept_BV is logits_BV else encode(kept_BV != -torch.inf)
            if params.most_probable:
                tops = most_probable(kept_BV, params.temperature, params.most_probable).split([1] * len(rows))
        given = zip(rows, token_B.tolist(), logp_B.tolist(), supports, tops, strict=True)
        for row, token, logp, support, top in given:
            if not row.reason:
                row.take(token, logp, support, top)
        return token_B


class _Row:
    """One completion on its way. ``reason``: why it ended; None: it goes on."""

    def __init__(self, params: SamplingParams, decode_text: Callable[[Sequence[int]], str] | None) -> None:
        self.params, self.reason = params, cast("FinishReason | None", None)
        self.tokens: list[int] = []
        self.logps: list[float] = []
        self.supports: list[Any] = []
        self.tops: list[Any] = []
        self._strings = StopStrings(params.stop, decode_text) if params.stop and decode_text is not None else None

    def take(self, token: int, logp: float, support: Any, top: Any) -> None:
        """One more token. ``MantissaError`` where its log-prob is not finite."""
        if not math.isfinite(logp):
            raise MantissaError(
                f"token {len(self.tokens) + 1} of a completion has a log-prob that is not finite; look at the model"
            )
        self.tokens.append(token)
        self.logps.append(logp)
        self.supports.append(support)
        self.tops.append(top)
        stopped = token in self.params.stop_token_ids
        if not stopped and self._strings is not None:
            stopped = self._strings.completed(self.tokens)
        if stopped:
            self.reason = "stop"
        elif len(self.tokens) == self.params.max_tokens:
            self.reason = "length"

    def completion(self, version: int, key: int) -> Completion:
        assert self.reason is not None
        return Completion(
            tuple(self.tokens), torch.tensor(self.logps), self.reason, version, key,
            support=Support.of(self.supports) if self.tokens and self.supports[0] is not None else None,
            most_probable=MostProbable.join(self.tops) if self.tokens and self.tops[0] is not None else None,
        )  # fmt: skip


class PolicyEngine(TransformersEngine):
    """The engine of a run whose policy is by transformers' code. See ``RolloutEngine``.

    An adopted policy samples itself: nothing is copied. Else a copy in the format of ``role`` does, rounded once; or
    with ``alone`` the policy's model, which then nothing trains.
    """

    release, evidence = "", ""

    def __init__(
        self,
        policy: TransformersPolicy,
        role: ResolvedRole,
        slots: int,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        alone: bool = False,
    ) -> None:
        sampling = policy
        if policy.adopted is None:
            sampling = in_role(policy.model if alone else copy.deepcopy(policy.model), role)
        super().__init__(sampling, None, slots, decode_text)
        self.format, self._formats = role.active, (role.active, policy.format)
        self.version = -1

    @property
    def format_name(self) -> str:
        """What it computes in."""
        return self.format.name

    @property
    def weights(self) -> dict[str, Tensor]:
        """What it samples with, by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take the masters, each rounded once. ``MantissaError``: one that its format or the learner's cannot hold."""
        self.version = -1
        # An adopted policy samples itself: what it is given is its own.
        taken(dict(self.model.named_parameters()), weights, "sync", self._formats)
        self.version = version

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """As the engine's, of the version that is loaded."""
        if version != self.version:
            raise MantissaError(f"asked for policy version {version}, and version {self.version} is loaded")
        return super().generate(requests, params, version)

    def pause(self) -> None:
        """Nothing of it is memory that the learner could have."""

    def close(self) -> None:
        """It has no processes."""


def save_transformers(
    policy: TransformersPolicy, tokenizer: Tokenizer, path: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a Hugging Face folder: config, weights in fp32, tokenizer. The old folder or the new one, no mixture.

    ``weights``: the model's by name, whole, where it holds slices; None: its own.
    """
    with atomic_folder(path) as temporary, _quietly():
        tokenizer.save(temporary)
        policy.model.save_pretrained(temporary, state_dict=None if weights is None else dict(weights))


def place_transformers(policy: TransformersPolicy, device: torch.device, ranks: Ranks) -> TransformersPolicy:
    """The policy whole on ``device``, or with a slice of each tensor there, as ``place`` does with our decoder's."""
    model = policy.model
    if not ranks.sharded:
        model.to(device)
        return policy
    names = set(getattr(model, "_no_split_modules", None) or ())
    shard([*(each for each in model.modules() if type(each).__name__ in names), model], device, ranks)
    return policy


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of tokens as one tensor, zeros to their left, and its mask; int64."""
    width = max(map(len, rows))
    tokens, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for each, own, row in zip(tokens, mask, rows, strict=True):
        each[width - len(row) :], own[width - len(row) :] = torch.tensor(row), 1
    return tokens.to(device), mask.to(device)
