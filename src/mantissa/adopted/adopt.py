"""``adopt``: a causal language model of transformers under Mantissa's kernels, and off them again."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.adopted import attention as attentions
from mantissa.adopted.census import LENGTH, census, compare, drawn, read
from mantissa.adopted.recurrence import Replaced, replaced, replacements
from mantissa.adopted.route import RUNNING, Routed, check_layers
from mantissa.base.errors import MantissaError, on_failure
from mantissa.kernels import ExactPlan, ModelShapes, ResolvedRole, plan_exact, resolve
from mantissa.precision import BF16, FP16, FP32, NumberFormat, PrecisionPolicy, format_named

Plans = Mapping[tuple[int, int, int], ExactPlan]
_FORMATS = (FP32, BF16, FP16)
_SETTINGS = {"_attn_implementation_internal": attentions.NAME, "_experts_implementation_internal": "eager"}


class Adopted:
    """A model's adoption: what it computes in, what was proven, and the way back (``release``). Also a context.

    ``lines``: for a screen: the format and its kernels, each product's and attention's calls, and what was compared.
    """

    def __init__(self, mode: Routed, lines: list[str], recurrences: Replaced) -> None:
        self.mode, self.lines, self._recurrences = mode, lines, recurrences
        self._model: nn.Module | None = None
        self._before: list[tuple[Any, str, Any]] = []

    @property
    def format(self) -> NumberFormat:
        """What the model computes in."""
        return self.mode.format

    @property
    def plans(self) -> Plans:
        """How this processor's products and attentions are computed, by an attention's heads; empty on a GPU."""
        return dict(self.mode.plans or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Adopted:
        return self  # of a copied model: the same plan; it holds no weights

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> Adopted:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextlib.contextmanager
    def running(self, head: Tensor | None = None, place: attentions.Place | None = None) -> Iterator[None]:
        """Within this, torch's functions are the routes' (once, however often it is entered)."""
        if RUNNING.modes and RUNNING.modes[-1] is self.mode:
            yield
            return
        RUNNING.modes.append(self.mode)
        RUNNING.heads.append(head)
        RUNNING.places.append(place)
        try:
            with replaced(self._recurrences), self.mode:
                yield
        finally:
            for stack in (RUNNING.modes, RUNNING.heads, RUNNING.places):
                stack.pop()

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Within this, no weight changes: what a product reads of it is made once."""
        return self.mode.keeping()

    def knows(self, copy: nn.Module) -> None:
        """Let a copy of the model be quantised as the model is: by the names of its own weights."""
        self.mode.names |= _names(copy)

    def check(self, model: Any) -> None:
        """``MantissaError`` where something was changed since the model was adopted that its proof was of."""
        if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            raise MantissaError(
                "adopt: autocast is on, which would round what the exact kernels compute; turn it off, and adopt the "
                "model with precision=bf16 or fp16"
            )
        if torch.compiler.is_compiling():
            raise MantissaError("adopt: an adopted model is not compiled; release it first, or leave torch.compile out")
        config = model.config.get_text_config()
        changed = [name for name, value in _SETTINGS.items() if getattr(config, name, value) != value]
        weight = model.get_input_embeddings().weight
        if weight.dtype is not (torch.float32 if self.mode.cast else self.format.dtype):
            changed.append(f"dtype={str(weight.dtype).removeprefix('torch.')}")
        if changed:
            raise MantissaError(
                f"adopt: {', '.join(changed)} was set after the model was adopted; release it, and adopt it anew"
            )

    def _take(self, model: nn.Module) -> None:
        """Put the model's classes and settings under the routes."""
        from transformers import PreTrainedModel
        from transformers.modeling_layers import GradientCheckpointingLayer

        self._model = model
        for module in model.modules():
            if isinstance(module, PreTrainedModel | GradientCheckpointingLayer):
                kind: Any = type(module)
                self._set(module, "__class__", _under(kind, _Model if isinstance(module, PreTrainedModel) else _Layer))
                module.__dict__["_adopted"] = self
        configs: dict[int, Any] = {}
        for module in model.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
                configs[id(module.config)] = module.config
        for config in configs.values():
            for name, value in _SETTINGS.items():
                self._set(config, name, value)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name, None)))
        setattr(owner, name, value)

    def release(self) -> None:
        """The model as it was: its classes, its settings. Copies made of it since remain adopted."""
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)
        for module in () if self._model is None else self._model.modules():
            module.__dict__.pop("_adopted", None)
        self._before, self._model = [], None


class _Layer:
    """A layer that may be computed a second time by itself, in a backward pass (gradient checkpointing)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._adopted.running():  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _Model:
    """A model, or the one inside it without a head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adopted: Adopted = self._adopted  # type: ignore[attr-defined]
        if RUNNING.modes and RUNNING.modes[-1] is adopted.mode:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        given = _given(super().forward, args, kwargs)  # type: ignore[misc]
        adopted.check(self)
        place = _placed(given)
        outputs = self.get_output_embeddings()  # type: ignore[attr-defined]
        with adopted.running(getattr(outputs, "weight", None), place):
            return super().forward(**given)  # type: ignore[misc]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._adopted.keeping():  # type: ignore[attr-defined]
            return super().generate(*args, **kwargs)  # type: ignore[misc]


@functools.cache
def _under(kind: Any, part: Any) -> Any:
    """A subclass of ``kind`` by the same name, whose calls are routed."""
    return type(kind.__name__, (part, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _given(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with position ids made of the mask where none were given."""
    signature = inspect.signature(forward)
    bound = signature.bind_partial(*args, **kwargs).arguments
    more = bound.pop(next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), ""), {})
    given = {**bound, **more}
    mask, tokens = given.get("attention_mask"), _tokens(given)
    counted = "position_ids" in signature.parameters and given.get("position_ids") is None
    if counted and isinstance(mask, Tensor) and mask.dim() == 2:
        given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
    return given


def _tokens(given: dict[str, Any]) -> Tensor:
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if not isinstance(tokens, Tensor):
        raise MantissaError("adopt: the model was called without input_ids or inputs_embeds")
    return tokens


def _placed(given: dict[str, Any]) -> attentions.Place:
    """Where the columns of this call stand. ``MantissaError`` where that is not known."""
    tokens, mask, cache = _tokens(given), given.get("attention_mask"), given.get("past_key_values")
    past = _cached(cache)
    if past is None:  # a cache of states alone
        past = mask.shape[1] - tokens.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 0
    columns = past + tokens.shape[1]
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != columns):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise MantissaError(
            f"adopt: attention_mask is {shape}; expected one of {tokens.shape[0]} rows by {columns} columns, 1 where a "
            "token is: a mask made by hand does not say where a row begins"
        )
    place = attentions.places(mask, columns, len(tokens))
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == tokens.shape[1]:
        _check_positions(positions, mask, past)
    return place


def _check_positions(positions: Tensor, mask: Tensor | None, past: int) -> None:
    """Refuse rows that hold several sequences: positions must go up by one from token to token."""
    steps = positions[:, 1:] - positions[:, :-1]
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask[:, past:].bool().expand_as(positions)
    if bool(((steps != 1) & real[:, 1:] & real[:, :-1]).any()):
        raise MantissaError(
            "adopt: position_ids do not go up by one along a row: rows that hold several sequences are not adopted; "
            "give each sequence a row, and a mask"
        )


def _cached(cache: Any) -> int | None:
    """Columns in the cache; None where it has states alone. ``MantissaError``: its keys are in another order."""
    from transformers import DynamicCache
    from transformers.cache_utils import Cache, StaticCache

    if cache is None:
        return 0
    if not isinstance(cache, Cache) or isinstance(cache, StaticCache) or type(cache).__name__ == "QuantizedCache":
        raise MantissaError(
            f"adopt: the cache is a {type(cache).__name__}; expected transformers' {DynamicCache.__name__}, whose keys "
            "lie in the order of their positions"
        )
    keyed = [layer for layer in cache.layers if hasattr(layer, "keys")]
    return int(keyed[0].get_seq_length()) if keyed else None if cache.layers else 0


def adopt(
    model: nn.Module,
    precision: str | PrecisionPolicy | None = None,
    length: int | None = None,
    plans: Plans | None = None,
) -> Adopted:
    """Put a causal language model of transformers under Mantissa's kernels, in place; ``release`` takes it off again.

    Whole forward, prefill and decode, alone or in any batch, padded left or right: a position's logits are then equal
    to the last bit. The model's class, code, parameters and checkpoints stay, and so do ``generate``, gradient
    checkpointing, adapters. Gradients are torch's. Logits are fp32.

    ``precision``: a format (``fp32``, ``bf16``, ``fp16``; ``fp8``, ``mxfp8``, ``int8``, ..., whose quantised products
    are the policy's), or a policy whose roles agree; None: what the parameters are in. Parameters in fp32 are masters
    of a half: cast, or quantised, where they are used. ``length``: positions of the longest sequence;
    None: what the model was made for, up to 4096. ``plans``: those of another process that adopted this model
    (``Adopted.plans``), whose bits are wanted; None: found here.

    ``MantissaError``, and nothing changed, for what is no such model, or has an operation or a cache that has no exact
    form (named with its module); proven on this model before it is used.
    """
    root = _checked(model)
    policy = _policy(root, precision)
    device = _device(root)
    role = resolve(policy, device).learner
    gpu = _on_gpu(device)
    if gpu and role.fp8 is not None:
        raise MantissaError(f"adopt: {role.fp8.kind} of other people's models is for a CPU so far; on {device} choose "
                            "fp32, bf16 or fp16")  # fmt: skip
    mode = Routed(role.active, _casts(root, role), format_named(policy.logits), role.fp8, gpu)
    mode.names = _names(root)
    if role.fp8 is not None:
        check_layers(role.fp8, root)
    masters = " of fp32 parameters" if mode.cast else ""
    head = f"{type(root).__name__} in {role.name}{masters}, logits {policy.logits}"
    adopted = Adopted(mode, [f"{head}: exact kernels by {role.backend} products"], replacements(root))
    vocabulary, longest = root.config.get_text_config().vocab_size, _longest(root, length)
    tokens = drawn(vocabulary, min(LENGTH, longest)).to(device)
    adopted._take(root)
    with on_failure(adopted.release):
        _read(root, adopted, tokens)
        mode.plans = {} if gpu else _plans(mode, role, vocabulary, longest) if plans is None else dict(plans)
        mode.length = longest if gpu else mode.plan.length
        counted = census(root, mode, tokens[:, : min(40, tokens.shape[1])])
        planned = ["products, sums and attention: Triton's, in one order for any number of rows"]
        adopted.lines += [*(planned if gpu else mode.plan.lines()), counted, compare(root, tokens)]
    return adopted


def _names(root: nn.Module) -> dict[int, str]:
    """Names of a model's parameters, by id; of a module's weight the module's."""
    return {id(p): name.removesuffix(".weight") for name, p in root.named_parameters()}


def _read(root: nn.Module, adopted: Adopted, tokens: Tensor) -> None:
    try:
        read(root, tokens[:, : min(40, tokens.shape[1])])
    except MantissaError:
        raise
    except Exception as error:  # the model's own code, which may expect other arguments than tokens
        raise MantissaError(f"adopt: {type(root).__name__} does not run on a batch of tokens: {error}") from error


def _plans(mode: Routed, role: Any, vocabulary: int, length: int) -> dict[tuple[int, int, int], ExactPlan]:
    products = tuple(
        (f"lm_head.{name}" if wide else f"model.{name}", size[1], size[0])
        for (size, wide), name in mode.products.items()
    )
    plans: dict[tuple[int, int, int], ExactPlan] = {}
    for heads in sorted(mode.heads) or [(1, 1, 16)]:  # without attention: a recurrence alone
        shapes = ModelShapes(() if plans else products, *heads, vocabulary, length)
        plans[heads] = plan_exact(shapes, role, "cpu", masked=True)
    return plans


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _longest(root: Any, length: int | None) -> int:
    made_for = getattr(root.config.get_text_config(), "max_position_embeddings", None) or 4096
    return min(made_for, 4096) if length is None else length


def _policy(root: Any, precision: str | PrecisionPolicy | None) -> PrecisionPolicy:
    """With exact kernels; None: in what the parameters are."""
    if precision is None:
        own = _own(root)
        if own is None:
            raise MantissaError(
                f"adopt: the parameters are in {_dtypes(root)}; expected one of fp32, bf16, fp16; name a precision"
            )
        precision = own.name
    if isinstance(precision, str):
        policy = PrecisionPolicy(train=precision, rollout=precision, kernels="exact")
    else:
        policy = precision.model_copy(update={"kernels": "exact"})
    if policy.train != policy.rollout:
        raise MantissaError(
            f"adopt: precision has train={policy.train} and rollout={policy.rollout}; one model has one format"
        )
    return policy.of_layers(root.config.get_text_config().num_hidden_layers)


def _casts(root: Any, role: ResolvedRole) -> bool:
    """Whether parameters are fp32 masters that are cast. ``MantissaError`` where they are in another format."""
    if role.active not in _FORMATS:
        raise MantissaError(f"adopt: precision {role.name}: expected fp32, bf16, fp16, fp8 or a scaled format")
    own = _own(root)
    if own not in (FP32, role.active):
        raise MantissaError(
            f"adopt: the parameters are in {_dtypes(root)}, and precision is {role.name}; load the model in fp32 or "
            f"{role.active.name}"
        )
    return own is not role.active


def _own(root: Any) -> NumberFormat | None:
    """The format of all parameters; None where they have several, or another."""
    dtypes = {p.dtype for p in root.parameters() if p.is_floating_point()}
    return next((fmt for fmt in _FORMATS if dtypes == {fmt.dtype}), None)


def _dtypes(root: Any) -> str:
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in root.parameters() if p.is_floating_point()}))


def _device(root: nn.Module) -> torch.device:
    devices = {p.device for p in root.parameters()}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        found = ", ".join(sorted(map(str, devices)))
        raise MantissaError(f"adopt: the model is on {found}; expected a CPU, or one CUDA device")
    return devices.pop()


def _checked(model: nn.Module) -> Any:
    """The causal language model that ``model`` is or wraps. ``MantissaError`` for what is none."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise MantissaError("adopt: transformers is not installed; pip install 'mantissa-rl[train]'") from None
    wrapped: Any = getattr(model, "get_base_model", None)  # peft's
    root: Any = model if wrapped is None else wrapped()
    if not isinstance(root, PreTrainedModel):
        raise MantissaError(
            f"adopt: {type(model).__name__} is no model of transformers; expected a causal language model"
        )
    name, config = type(root).__name__, root.config
    if hasattr(root, "_adopted"):
        raise MantissaError(f"adopt: this {name} has been adopted already; release it first")
    if "forward" in vars(root):
        raise MantissaError(
            f"adopt: the forward of this {name} has been replaced (by TRL's trainer: mantissa.dropin.trl.adopt; by "
            "accelerate's autocast: ask for no mixed precision); adopt the model first"
        )
    if not type(root).__module__.startswith("transformers."):
        raise MantissaError(
            f"adopt: {name} is not transformers' own code ({type(root).__module__}), which cannot be known"
        )
    if config.is_encoder_decoder or not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise MantissaError(f"adopt: {name} is no causal language model; expected one of transformers' ...ForCausalLM")
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise MantissaError(f"adopt: {name} has a vision or audio part; load its text model alone")
    if getattr(config, "quantization_config", None) is not None or getattr(root, "hf_quantizer", None) is not None:
        raise MantissaError(f"adopt: {name} is a quantised checkpoint; load it in fp32, bf16 or fp16")
    _register()
    return root


@functools.cache
def _register() -> None:
    """Name the attention, and masks that say what each query sees, to transformers; once a process."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "allow_torch_fix": False}
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register(attentions.NAME, attentions.attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(attentions.NAME, mask)
