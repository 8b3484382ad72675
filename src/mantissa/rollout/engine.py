"""The contract that every rollout engine keeps, the weights that one holds, and the native engine.

``CopiedPolicy`` is a policy that does not train: a decoder whose weights are copies of a learner's masters, in their
kernels' own form. A copy is made once from the fp32 master: rounded to the format, or for a layer in fp8 quantised to
codes and scales. What is kept is what the kernels multiply: fp32 values on the grid (simulated), a half dtype (native),
or the codes themselves with their scales beside them (native fp8). A policy that only samples may keep its projections,
and once more its tied head, in the layout that its products read fastest (``kernels/cpu.py``).

The native engine is our decoder with such copies, our kernels, a cache, and continuous batching: the rollout multiplies
exactly the values that the learner multiplies, whose kernels do the same to the same masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from mantissa.base.errors import MantissaError, nearest
from mantissa.kernels import Kernels, Planned, Traced
from mantissa.kernels.compiled import Laid, is_laid
from mantissa.kernels.cpu import joinable
from mantissa.model import ModelConfig
from mantissa.model.decoder import MLP, Attention, Decoder, Joined, Projection
from mantissa.precision import BlockScaled, NumberFormat
from mantissa.rollout.generation import Generation, KVCache
from mantissa.rollout.sampling import (
    Completion,
    Request,
    SamplingParams,
    draw,
    filter_logits,
    probabilities,
    request_keys,
)
from mantissa.rollout.step import Step, compiled_step
from mantissa.rollout.support import MostProbable, Support

T = TypeVar("T")


class CopiedPolicy:
    """A decoder that holds copies. ``who`` begins its errors: ``sync``, ``reference``.

    ``pack``: keep matrices in their products' layout (``Kernels.laid``).

    It holds NaN until ``take`` has succeeded: a policy with half its weights is nobody's policy.
    """

    def __init__(
        self, config: ModelConfig, kernels: Kernels, device: torch.device | str, who: str, pack: bool = False
    ) -> None:
        self.kernels, self.who = kernels, who
        self._pack = pack
        with torch.device("meta"):  # neither memory nor random values for what ``take`` overwrites
            decoder = Decoder(config).requires_grad_(False)
        self.decoder = decoder.to(kernels.dtype).to_empty(device=torch.device(device))
        self._block_of: dict[Projection, Attention | MLP] = {}  # those that are joined with others
        self._waiting: list[Tensor | BlockScaled] = []  # copies of a block's first ones, until the last one comes
        for block in decoder.modules():
            if self._pack and isinstance(block, Attention | MLP) and self._joins(block):
                self._block_of |= dict.fromkeys(block.alike, block)
        self._poison()

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is kept, by parameter name, in its own dtype; the scales of codes as ``NAME.scales``."""
        kept: dict[str, Tensor] = {}
        for name, owner, parameter in self._parameters():
            if isinstance(owner, Projection) and owner in self._block_of and parameter is owner.weight:
                kept |= self._part(name, owner)
                continue
            kept[name] = parameter.detach().to_dense() if is_laid(parameter) else parameter.detach()
            if isinstance(owner, Projection) and owner.scales is not None and parameter is owner.weight:
                kept[f"{name}.scales"] = owner.scales
        return kept

    def take(self, masters: Mapping[str, Tensor]) -> None:
        """Become a copy of the policy with these fp32 masters, each rounded or quantised once.

        Sharded masters are made whole one at a time; every rank that holds a shard must call this.
        Fails closed: the destination is filled with NaN first and checked after. A missing, unknown, misshapen or
        non-finite tensor, one that is not fp32, and one beyond the format's largest value are errors that name it.
        """
        self._poison()
        self._check_names(masters)
        names, peaks = [], []
        with torch.no_grad():
            for name, owner, parameter in self._parameters():
                master = _whole(masters[name].detach()).to(parameter.device)
                kept = self._keep(owner, parameter, master)
                names.append(name)
                # The largest magnitude of the master and of what is now stored; NaN wins a maximum, so one that was
                # not written shows. One transfer to the host for all tensors.
                largest, same = peak(master), kept.data_ptr() == master.data_ptr()  # fp32's copy is the master
                peaks.append(torch.stack((largest, largest if same else peak(kept).float())))
            for block in set(self._block_of.values()):
                self._join_biases(block)
            self.decoder.packed_head = self._tied_head() if self._pack and self.decoder.lm_head is None else None
            peaks_N2 = torch.stack(peaks).cpu()
        for name, (master_peak, stored_peak) in zip(names, peaks_N2.tolist(), strict=True):
            self._check_peak(name, master_peak, stored_peak)

    def _keep(self, owner: nn.Module, parameter: nn.Parameter, master: Tensor) -> Tensor:
        """Copy one master into its place; returns what now lies there."""
        weight_of = isinstance(owner, Projection) and parameter is owner.weight
        copy = self.kernels.copied(master, owner.name if isinstance(owner, Projection) and weight_of else "")
        if isinstance(owner, Projection) and weight_of and owner in self._block_of:
            self._join(self._block_of[owner], owner, copy)
            return copy if isinstance(copy, Tensor) else copy.scales
        if isinstance(copy, Tensor):
            laid = self.kernels.laid(copy, owner.name) if self._pack and weight_of else copy  # type: ignore[arg-type]
            if not is_laid(laid):
                return parameter.copy_(copy)
            owner.weight = nn.Parameter(laid, requires_grad=False)
            return copy
        assert isinstance(owner, Projection)  # nothing else has a name, and only what has one is quantised
        codes = self.kernels.laid(copy, owner.name) if self._pack else copy.codes
        if is_laid(codes):
            owner.weight, owner.scales = nn.Parameter(codes, requires_grad=False), copy.scales
            return copy.scales.amax()
        self._make_room(owner, copy)
        assert owner.scales is not None
        owner.weight.copy_(copy.codes)
        owner.scales.copy_(copy.scales)
        return torch.stack((owner.weight.float().abs().amax(), owner.scales.amax()))

    def _joins(self, block: Attention | MLP) -> bool:
        """Whether the projections of one input can be one product: on this device, and all in one format.

        Never with exact kernels: they multiply by the shapes that the learner has, which alone are proven.
        """
        if isinstance(self.kernels, Planned):
            return False
        fp8 = self.kernels.fp8
        same = fp8 is None or len({fp8.quantizes(part.name) for part in block.alike}) == 1
        return same and joinable([part.weight for part in block.alike])

    def _join(self, block: Attention | MLP, part: Projection, copy: Tensor | BlockScaled) -> None:
        """Take one projection's copy; with the last one, make the weight of their one product."""
        self._waiting.append(copy)
        if part is block.alike[-1]:
            codes = [copy if isinstance(copy, Tensor) else copy.codes for copy in self._waiting]
            scales = [copy.scales for copy in self._waiting if isinstance(copy, BlockScaled)]
            scaled = BlockScaled(torch.cat(codes), torch.cat(scales)) if scales else None
            laid = self.kernels.laid(torch.cat(codes) if scaled is None else scaled, part.name)
            whole = laid if scaled is None else replace(scaled, codes=laid)
            block.joined = Joined(whole, None, tuple(map(len, codes)))
            self._waiting.clear()
        part.weight = _nothing(part.weight)

    def _part(self, name: str, owner: Projection) -> dict[str, Tensor]:
        """What ``weights`` holds of a projection that is joined with others; NaN before they are."""
        block = self._block_of[owner]
        if block.joined is None:
            return {name: owner.weight.detach()}
        weight, at = block.joined.weight, list(block.alike).index(owner)
        whole = weight if isinstance(weight, Tensor) else weight.codes
        found = {name: (whole.to_dense() if is_laid(whole) else whole).split(block.joined.widths)[at]}
        if isinstance(weight, BlockScaled):
            found[f"{name}.scales"] = weight.scales.split(block.joined.widths)[at]
        return found

    def _join_biases(self, block: Attention | MLP) -> None:
        biases: list[Tensor] = [part.bias for part in block.alike if part.bias is not None]
        assert block.joined is not None
        if biases:
            block.joined = replace(block.joined, bias=torch.cat(biases))

    def _tied_head(self) -> Tensor | None:
        """A tied head in its product's layout, beside the embedding; None where there is none for it."""
        tied = self.decoder.head_weight
        if tied.device.type != "cpu":
            return None
        copy = self.kernels.copied(tied.float(), "lm_head")  # its values are on the grid, and stay
        assert isinstance(copy, Tensor)  # a head is never quantised
        head = self.kernels.laid(copy, "lm_head")
        return head if is_laid(head) else None

    @staticmethod
    def _make_room(owner: Projection, copy: BlockScaled) -> None:
        """The first time that a weight comes as codes; from then on they are copied into the same place."""
        if owner.scales is None:
            owner.weight = nn.Parameter(torch.empty_like(copy.codes), requires_grad=False)
            owner.scales = torch.empty_like(copy.scales)

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Before ``weights`` are overwritten by those of another such policy: hold codes wherever that one did."""
        for name, owner, parameter in self._parameters():
            scales = tensors.get(f"{name}.scales")
            if scales is not None and isinstance(owner, Projection):
                device = parameter.device
                self._make_room(owner, BlockScaled(tensors[name].to(device), scales.to(device)))

    def _parameters(self) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
        """Every parameter with its name and the module it belongs to."""
        for prefix, module in self.decoder.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                yield f"{prefix}.{name}", module, parameter

    @torch.no_grad()
    def _poison(self) -> None:
        self.decoder.packed_head = None
        self._waiting.clear()
        for block in self._block_of.values():
            block.joined = None
        for _, owner, parameter in self._parameters():
            if is_laid(parameter) or _is_nothing(parameter):  # is replaced, not written to
                owner.weight = _nothing(parameter)
            elif parameter.is_floating_point():  # codes that are integers are told by their scales
                parameter.fill_(float("nan"))
            if isinstance(owner, Projection) and owner.scales is not None:
                owner.scales.fill_(float("nan"))

    def _error(self, name: str, what: str) -> MantissaError:
        return MantissaError(f"{self.who}: weight {name} {what}")

    def _check_names(self, masters: Mapping[str, Tensor]) -> None:
        expected = {name: parameter for name, _, parameter in self._parameters()}
        for name in (name for name in expected if name not in masters):
            raise self._error(name, f"is missing{nearest(name, masters)}; send every parameter")
        for name, master in masters.items():
            if name not in expected:
                tied = "; the head is tied to the embedding and is not sent" if name == "lm_head.weight" else ""
                raise MantissaError(f"{self.who}: unknown weight {name}{tied or nearest(name, expected)}")
            if master.shape != expected[name].shape:
                raise self._error(name, f"has shape {tuple(master.shape)}, expected {tuple(expected[name].shape)}")
            if master.dtype != torch.float32:
                raise self._error(
                    name, f"is {master.dtype}, expected the fp32 master: a second rounding changes values"
                )

    def _check_peak(self, name: str, master_peak: float, stored_peak: float) -> None:
        if math.isfinite(master_peak) and math.isnan(stored_peak):
            raise self._error(name, "was not written in full: NaN is left after the copy")
        require_held(self.who, name, master_peak, stored_peak, self.kernels.format)


def require_held(who: str, name: str, master_peak: float, stored_peak: float, fmt: NumberFormat) -> None:
    """``MantissaError`` where a master weight's largest magnitude is not finite, or not as ``fmt`` holds it."""
    if not math.isfinite(master_peak):
        raise MantissaError(f"{who}: weight {name} holds {master_peak}: expected finite values; training diverged")
    if not math.isfinite(stored_peak):
        cannot = f"which {fmt} cannot (largest {fmt.largest:g}): use bf16 or fp32"
        raise MantissaError(f"{who}: weight {name} holds {master_peak:g}, {cannot}")


def _nothing(weight: Tensor) -> nn.Parameter:
    """NaN in the shape of ``weight``, and no memory: for one that is kept elsewhere, or not yet. Of codes 0: their
    scales are NaN."""
    nan = torch.full((1, 1), float("nan") if weight.is_floating_point() else 0, dtype=weight.dtype)
    return nn.Parameter(nan.expand(weight.shape), requires_grad=False)


def _is_nothing(weight: Tensor) -> bool:
    return weight.dim() == 2 and not is_laid(weight) and weight.stride() == (0, 0)


def _whole(master: Tensor) -> Tensor:
    """All of a tensor that several processes hold shards of; any other tensor itself."""
    gather = getattr(master, "full_tensor", None)
    return master if gather is None else gather()


def peak(x: Tensor) -> Tensor:
    """The largest magnitude, NaN where there is one, in one pass over the memory: ``x.abs().amax()`` makes three."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


class RolloutEngine(Protocol):
    """Anything that can sample: our native engine, or another behind the same contract.

    ``release``: which program samples, and its version; empty for this package's own. ``evidence``: what it was seen to
    do at its start; empty where the kernels are this package's, which are probed. ``format_name``: what it computes in.
    """

    release: str
    evidence: str

    @property
    def format_name(self) -> str: ...

    @property
    def version(self) -> int:
        """The policy version of the weights now loaded; -1 before the first ``sync``."""
        ...

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load the learner's master weights, rounded once to the rollout's format, and stamp them ``version``.

        Fails closed: the destination is filled with NaN first and checked after; a missing, unknown, misshapen or
        non-finite tensor is an error that names it, and the engine then refuses to generate.
        """
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Sample every request; result[i][j] is sample j of request i. ``version`` must be the one loaded."""
        ...

    def pause(self) -> None:
        """Nothing is sampled until the next ``sync``: give memory back to the learner, where that was asked for."""
        ...

    def close(self) -> None:
        """End the processes of an engine that has some."""
        ...


class CopyingEngine(RolloutEngine, Protocol):
    """A foreign engine whose weights this package keeps too, so that its share of the gap can be measured.

    ``copies``: the weights as they were sent, in this package's decoder; of the version ``copied_version`` (-1: none).
    """

    copies: CopiedPolicy
    copied_version: int


def check_version(asked: int, loaded: int) -> None:
    """Raise ``MantissaError`` unless the weights asked for are loaded. ``loaded``: -1 where none are."""
    if loaded < 0:
        raise MantissaError("the rollout engine holds no weights (or its last sync failed): call sync first")
    if asked != loaded:
        raise MantissaError(f"policy version {asked} was asked for, {loaded} is loaded: call sync first")


def check_requests(
    requests: Sequence[Request], params: SamplingParams, vocabulary: int, max_length: int, decodes: bool
) -> None:
    """Raise ``MantissaError`` at the first request that cannot be sampled as asked.

    ``vocabulary``: how many tokens there are. ``max_length``: prompt and response tokens of one sample together.
    ``decodes``: whether the engine can turn tokens into text, which stop strings need.
    """
    if params.stop and not decodes:
        raise MantissaError("stop strings need text: give the engine decode_text, or use stop_token_ids")
    for token in params.stop_token_ids:
        if not 0 <= token < vocabulary:
            raise MantissaError(f"stop token {token}: the vocabulary is 0..{vocabulary - 1}")
    for index, request in enumerate(requests):
        prompt = request.prompt_tokens
        if not prompt:
            raise MantissaError(f"request {index}: the prompt is empty; give at least one token, such as BOS")
        if request.samples < 1:
            raise MantissaError(f"request {index}: samples={request.samples}, expected at least 1")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            bad = next(token for token in prompt if not 0 <= token < vocabulary)
            raise MantissaError(f"request {index}: token {bad} is outside the vocabulary 0..{vocabulary - 1}")
        if len(prompt) + params.max_tokens > max_length:
            raise MantissaError(
                f"request {index}: {len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed "
                f"max_length={max_length}; shorten the prompt, lower max_tokens or raise max_length"
            )


@dataclass(frozen=True)
class Call:
    """What one ``generate`` was asked, and what it answered.

    ``tokens``: the responses of all samples of all requests, in order; None for one that is not known.
    """

    requests: tuple[Request, ...]
    params: SamplingParams
    tokens: tuple[tuple[int, ...] | None, ...]

    @property
    def keys(self) -> list[int]:
        """The key of each sample's uniforms, in the order of ``tokens``."""
        return request_keys(self.requests).tolist()


def told(
    completions: Sequence[Completion], what: str, pick: Callable[[Completion], T | None], nothing: Callable[[T], T]
) -> list[T] | None:
    """What an engine tells of each completion, by ``pick``; None where it tells it of none.

    ``nothing``: of an empty response of which it is not told, given another's. ``MantissaError``, with its name
    ``what``, where some responses with tokens have it and others do not: whoever took it for none would score those
    that have it otherwise.
    """
    found = [pick(completion) for completion in completions]
    example = next((value for value in found if value is not None), None)
    if example is None:
        return None
    silent = sum(value is None and bool(each.tokens) for value, each in zip(found, completions, strict=True))
    if silent:
        raise MantissaError(
            f"the rollout engine told {what} of some completions and not of {silent} of {len(found)} in the same "
            "batch: expected all or none; mend the engine"
        )
    return [nothing(example) if value is None else value for value in found]


def supports(completions: Sequence[Completion]) -> list[Support] | None:
    """``told`` of what each token was drawn from."""
    return told(completions, "what tokens were drawn from", lambda each: each.support, lambda _: Support.of([]))


def most_probable(completions: Sequence[Completion]) -> list[MostProbable] | None:
    """``told`` of the sampler's most probable tokens."""
    return told(completions, "the most probable tokens", lambda each: each.most_probable, MostProbable.nothing_like)


_SLACK = 2.0**-20  # of a uniform: a GPU may add up a softmax in another order beside other rows
_AT_ONCE = 1 << 22  # probabilities held at a time: 16 MiB, and twice that of sums


def drawn_otherwise(logits_NV: Tensor, tokens_N: Tensor, params: SamplingParams, uniform_N: Tensor) -> Tensor:
    """Which ``tokens_N`` the uniforms do not select from the distribution of ``logits_NV`` under ``params``. bool, N.

    Temperature above 0. By ``draw`` itself; a token within 2^-20 of the uniform that was drawn by counts as selected.
    """
    otherwise_N = torch.zeros_like(tokens_N, dtype=torch.bool)
    rows = max(1, _AT_ONCE // logits_NV.shape[-1])
    for logits, tokens, uniform, otherwise in zip(
        *(x.split(rows) for x in (logits_NV, tokens_N, uniform_N, otherwise_N)), strict=True
    ):
        of_tokens = probabilities(filter_logits(logits, params), params.temperature)
        otherwise.copy_(draw(of_tokens, uniform) != tokens)
        if bool(otherwise.any()):
            low, high = (draw(of_tokens, (uniform + s).clamp(0.0, 1.0)) for s in (-_SLACK, _SLACK))
            otherwise.logical_and_((tokens < low) | (tokens > high))
    return otherwise_N


class NativeEngine:
    """A ``RolloutEngine`` in this process.

    ``kv_format``: the grid that keys and values are rounded to before anything attends to them, in prefill and decode
    alike. ``slots``: rows decoded at a time. ``max_length``: prompt and response tokens of one sample together.
    ``decode_text``: token ids to text, needed for stop strings only. ``expert_weights``: completions of a policy with
    mixtures of experts say the weights of those that their positions passed, too.
    ``calls`` are those since the last ``sync``, where ``keeps_calls`` is set, so that each can be replayed.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        kv_format: NumberFormat,
        slots: int,
        max_length: int,
        device: torch.device | str = "cpu",
        decode_text: Callable[[Sequence[int]], str] | None = None,
        expert_weights: bool = False,
    ) -> None:
        if slots < 1 or max_length < 2:
            raise MantissaError(f"slots={slots}, max_length={max_length}: expected at least 1 slot and 2 tokens")
        if max_length > config.max_position_embeddings:
            raise MantissaError(
                f"max_length={max_length}: the model has {config.max_position_embeddings} positions; lower max_length"
            )
        self.release = self.evidence = ""
        self.config, self.kernels, self.kv_format = config, kernels, kv_format
        self.slots, self.max_length = slots, max_length
        self.device = torch.device(device)
        self.keeps_calls = False
        self.expert_weights = expert_weights
        self.interrupted: Callable[[], bool] = lambda: False  # asked before every step of ``generate``
        self.calls: list[Call] = []
        self._decode_text = decode_text
        self._copies = CopiedPolicy(config, kernels, self.device, "sync", pack=True)
        self.model = self._copies.decoder
        self._version = -1
        self._step: Step | None = None
        self._cache = KVCache(config, slots, kernels.dtype, self.device)

    @property
    def format_name(self) -> str:
        return self.kernels.format.name

    @property
    def format(self) -> NumberFormat:
        return self.kernels.format

    @property
    def weights(self) -> dict[str, Tensor]:
        """The copies that it samples with: ``CopiedPolicy.weights``."""
        return self._copies.weights

    def pause(self) -> None:
        """Nothing to do: its weights are this process's."""

    def close(self) -> None:
        """Nothing to end."""

    @property
    def version(self) -> int:
        """The policy version of the weights now loaded; -1 before the first ``sync`` and after one that failed."""
        return self._version

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load fp32 masters by name, rounded or quantised once, and stamp them ``version``. See ``RolloutEngine.sync``.

        A master beyond the format's largest value would become inf and is an error, as is one that is not finite.
        """
        if version < 0:
            raise ValueError(f"policy version {version}: expected 0 or more")
        self._version = -1  # from here on the engine refuses to generate, until every check has passed
        self._copies.take(weights)
        laid = any(isinstance(parameter, Laid) for parameter in self.model.parameters())
        self._step = compiled_step(self.model, self.kernels, self.kv_format) if laid else None
        self._version = version
        self.calls.clear()

    def generate(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[list[Completion]]:
        """Sample every request; result[i][j] is sample j of request i. See ``RolloutEngine.generate``.

        A sample depends on its prompt, its seed and its index, and on nothing else but the order of sums inside the
        device's matrix products: batch mates, slots and the order of requests do not enter.
        """
        check_version(version, self._version)
        check_requests(requests, params, self.config.vocab_size, self.max_length, self._decode_text is not None)
        results = self._run(requests, params, self.kernels)
        if self.keeps_calls:
            tokens = tuple(completion.tokens for completion in self._flat(results))
            self.calls.append(Call(tuple(requests), params, tokens))
        return results

    def again(self, call: Call, job: int) -> Completion:
        """Draw a call again, and return one of its samples: the same tokens, where the machine does not interfere."""
        return self._flat(self._run(call.requests, call.params, self.kernels))[job]

    def replay(self, call: Call, kernels: Traced, job: int) -> Completion:
        """Run a call again with ``kernels`` (this engine's, traced), noting what they give for one sample.

        Nothing is drawn where the call's tokens are known: they are taken, so every sample has the batch mates, the
        slot and the cache that it had. ``job``: the sample's number among all of the call, in order.
        """
        return self._flat(self._run(call.requests, call.params, kernels, job, call.tokens))[job]

    @staticmethod
    def _flat(results: list[list[Completion]]) -> list[Completion]:
        return [completion for group in results for completion in group]

    def _run(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        kernels: Kernels,
        watched: int | None = None,
        forced: Sequence[Sequence[int] | None] | None = None,
    ) -> list[list[Completion]]:
        self._cache.restart()
        setup = (self.model, kernels, self.kv_format, self._cache, requests, params, self._version, self._decode_text)
        step = self._step if kernels is self.kernels else None  # one that is traced notes each operation
        step = step if step is not None and step.holds else None
        generation = Generation(*setup, watched, forced, self.expert_weights, self.interrupted, step)
        try:
            with torch.no_grad():
                return generation.run()
        except BaseException:  # non-finite keys and values must not outlive the call that made them
            self._cache.clear()
            raise
