"""Where two policies that should be equal to the last bit part: both sides of one sequence, run again under watch.

The rollout's side is the whole call that sampled the sequence, batch mates, slots and cache included, made to take the
tokens that it took then: what is compared is the recorded sequence, on any machine. The learner's side is the
micro-batch that scored it. Each notes a digest of what every operation gave at every position of the sequence, the
log-prob included; the first position, and there the first operation, whose digests differ is where the two programs
part. What differs later may only follow from it. A second pass keeps the two vectors themselves. Then the draws: is
each token the one that its uniform selects from the learner's distribution?

A case can be written to one file and replayed elsewhere (``mantissa replay FILE``): it holds the fp32 weights, the
requests and what they were answered, the learner's micro-batch, both sides' log-probs as the run saw them and the
precision, and nothing of the task.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.base.files import write_atomically
from mantissa.base.readers.json import parse_json
from mantissa.base.readers.safetensors import open_tensors
from mantissa.kernels import (
    WAYS,
    Kernels,
    Pick,
    Traced,
    Way,
    first_difference,
    learner_kernels,
    operation,
    resolve,
    rollout_kernels,
)
from mantissa.model import Decoder, ModelConfig, RopeScaling
from mantissa.model.config import ExpertsShape
from mantissa.precision import PrecisionPolicy
from mantissa.rl.assemble import exact_plan
from mantissa.rl.experience import Sequences
from mantissa.rl.score import Packed, forward
from mantissa.rollout import Call, NativeEngine, Request, SamplingParams
from mantissa.rollout.engine import check_requests, drawn_otherwise
from mantissa.rollout.sampling import sample, uniforms
from mantissa.rollout.support import Support

_VERSION = 2
# Of the learner's micro-batch; its policy chooses experts for itself, as exact kernels' both sides do.
_OF_SEQUENCES = ("tokens_BT", "prompt_length_B", "length_B", "mask_BR")
_MOST = 1 << 20  # samples or slots that a file may speak of


@dataclass(frozen=True)
class Case:
    """One sequence on both sides.

    ``call``, ``job``: what sampled it, and its number among that call's samples. ``part``, ``row``: the learner's
    micro-batch, and its row there. ``temperature``: of the learner's log-probs. ``rollout_logp_T``, ``learner_logp_T``:
    of the response, fp32, as the run saw them; None in files of version 1. ``key``: of the uniforms that drew it; None
    where the call is not the one that sampled it (that one being unknown), but its tokens alone.
    """

    call: Call
    job: int
    part: Sequences
    row: int
    temperature: float
    rollout_logp_T: Tensor | None
    learner_logp_T: Tensor | None
    key: int | None

    @property
    def response(self) -> tuple[int, ...]:
        """The tokens that were sampled."""
        first, end = int(self.part.prompt_length_B[self.row]), int(self.part.length_B[self.row])
        return tuple(self.part.tokens_BT[self.row, first:end].tolist())


@dataclass(frozen=True)
class Culprit:
    """The first operation that gave the two sides different numbers.

    ``position``: in the sequence, prompt included, from 0. ``operation``: its name. ``rollout``, ``learner``: what it
    gave each of them there, fp32.
    """

    position: int
    operation: str
    rollout: Tensor
    learner: Tensor

    def __str__(self) -> str:
        elements = unequal(self.rollout, self.learner)
        first = int(elements.nonzero()[0])
        return (
            f"{self.operation} at position {self.position}: {int(elements.sum())} of {elements.numel()} numbers "
            f"differ, the first by {self.rollout[first]:.9g} (rollout) against {self.learner[first]:.9g} (learner)"
        )


@dataclass(frozen=True)
class Draw:
    """The first response token that its uniform does not select from the learner's distribution.

    ``token``: its place in the response. ``taken``, ``selected``: the token there, and the one that the uniform
    selects. ``again``: whether the rollout, drawing anew, draws it again.
    """

    token: int
    taken: int
    selected: int
    uniform: float
    again: bool

    def __str__(self) -> str:
        return (
            f"response token {self.token} is {self.taken}, and the uniform {self.uniform:.9g} selects {self.selected} "
            "from the learner's distribution: it was drawn from another"
        )


@dataclass(frozen=True)
class Found:
    """What running both sides again showed.

    ``culprit``: where their numbers part, None where nowhere. ``draw``: None where every token is the one that its
    uniform selects. ``rollout_T``, ``learner_T``: the log-probs of the response here, fp32.
    """

    culprit: Culprit | None
    draw: Draw | None
    rollout_T: Tensor
    learner_T: Tensor

    @property
    def reproduced(self) -> bool:
        """Whether the two sides differ here too."""
        return self.culprit is not None or (self.draw is not None and self.draw.again)

    def __str__(self) -> str:
        if self.culprit is not None:
            return f"they part in {self.culprit}"
        if self.draw is not None:
            again = "drawn anew, it comes out the same" if self.draw.again else "drawn anew, it comes out otherwise"
            return f"{self.draw}; {again}"
        return (
            "every operation gives both sides the same numbers, log-probs and draws included: the difference does not "
            "come back (another number of threads or processor, faulty memory, or code that has been mended since)"
        )

    def lines(self, case: Case) -> list[str]:
        """How the log-probs that the run saw compare with those here, bit by bit."""
        if case.rollout_logp_T is None or case.learner_logp_T is None:
            return ["the file is of version 1: it does not hold the log-probs that the run saw"]
        sides = {"rollout": (case.rollout_logp_T, self.rollout_T), "learner": (case.learner_logp_T, self.learner_T)}
        said = [f"the run's two sides: {_count(case.rollout_logp_T, case.learner_logp_T)} log-probs differ"]
        said += [f"the {name}, here against the run: {_count(a, b)} log-probs differ" for name, (a, b) in sides.items()]
        return said


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Where two fp32 tensors differ in a bit: -0.0 is not 0.0, and a NaN is itself. bool."""
    return one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)


def _count(one: Tensor, other: Tensor) -> str:
    return f"{int(unequal(one, other).sum())} of {len(one)}"


def examine(engine: NativeEngine, model: Decoder, kernels: Kernels, case: Case) -> Found:
    """Run both sides again and find where they part.

    ``model``, ``kernels``: the learner's. The engine must hold the weights that sampled the case.
    """
    rollout, learner, rollout_T, learner_T, logits_TV = _both(engine, model, kernels, case, None)
    if rollout.digests.keys() != learner.digests.keys():
        raise MantissaError("the two sides did not run the same operations, so where they part cannot be said")
    at, culprit = first_difference(rollout, learner), None
    if at is not None:
        one, other, *_ = _both(engine, model, kernels, case, at)
        if one.kept is not None and other.kept is not None and bool(unequal(one.kept, other.kept).any()):
            culprit = Culprit(at[0], operation(learner.names, at[1]), one.kept, other.kept)
    elif bool((differ_T := unequal(rollout_T, learner_T)).any()):
        token = int(differ_T.nonzero()[0])
        name = "what a side makes of token_logprob, which agrees,"
        position = int(case.part.prompt_length_B[case.row]) + token - 1
        culprit = Culprit(position, name, rollout_T[token : token + 1], learner_T[token : token + 1])
    return Found(culprit, _draw(engine, case, logits_TV), rollout_T, learner_T)


def _draw(engine: NativeEngine, case: Case, logits_TV: Tensor) -> Draw | None:
    """The first token of the case that its uniform does not select from the learner's logits."""
    if case.key is None:
        return None
    device, response = logits_TV.device, case.response
    params = dataclasses.replace(case.call.params, max_tokens=1, temperature=case.temperature)
    uniform_T = uniforms(torch.tensor(case.key, device=device), torch.arange(len(response), device=device))
    otherwise_T = drawn_otherwise(logits_TV, torch.tensor(response, device=device), params, uniform_T)
    if not bool(otherwise_T.any()):
        return None
    token = int(otherwise_T.nonzero()[0])
    selected, _ = sample(logits_TV[token : token + 1], params, uniform_T[token : token + 1])
    again = engine.again(case.call, case.job).tokens[: token + 1] == response[: token + 1]
    return Draw(token, response[token], int(selected), float(uniform_T[token]), again)


def _both(
    engine: NativeEngine, model: Decoder, kernels: Kernels, case: Case, keep: tuple[int, int] | None
) -> tuple[Traced, Traced, Tensor, Tensor, Tensor]:
    """Both traces, both sides' log-probs of the response (on the CPU), and the learner's logits."""
    rollout, learner = Traced(engine.kernels, keep), Traced(kernels, keep)
    completion = engine.replay(case.call, rollout, case.job)
    learner.begin(_row_of(case.part, case.row))
    with torch.no_grad():
        logits: list[Tensor] = []
        passed = forward(model, learner, case.part, case.temperature, look=lambda _, part: logits.append(part))
    before = int(case.part.mask_BR[: case.row].sum())
    response = slice(before, before + len(case.response))
    return rollout, learner, completion.logp_T, passed.logp_N[response].cpu(), torch.cat(logits)[response]


def _row_of(part: Sequences, row: int) -> Pick:
    """Every position of one row of a packed forward, but for its last token, which predicts nothing."""
    length, prompt = int(part.length_B[row]), int(part.prompt_length_B[row])
    packed_T = Packed.of(part).packed_BT[row, : length - 1]
    before = int(part.mask_BR[:row].sum())
    positions_T = torch.arange(length - 1, device=packed_T.device)

    def pick(kind: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "logits":
            return rows[before : before + length - prompt], positions_T[prompt - 1 :]
        if kind == "attention":  # over whole sequences again
            return rows[row, : length - 1], positions_T
        return rows[0].index_select(0, packed_T), positions_T

    return pick


# One file


def write_case(
    path: Path, case: Case, model: ModelConfig, policy: PrecisionPolicy, engine: NativeEngine, weights: Any, note: str
) -> None:
    """Write a case, the fp32 ``weights`` (by name) included; ``note`` is what was seen, for who opens the file."""
    from safetensors.torch import save

    shape = dataclasses.asdict(dataclasses.replace(model, origin={}))
    plan = getattr(engine.kernels, "plan", None)  # exact kernels on a CPU have one
    facts = {
        "version": _VERSION,
        "note": note,
        "model": shape,
        "precision": policy.model_dump(mode="json"),
        "way": None if plan is None else plan.way,
        "requests": [dataclasses.asdict(request) for request in case.call.requests],
        "params": dataclasses.asdict(case.call.params),
        "engine": {"slots": engine.slots, "max_length": engine.max_length},
        "job": case.job,
        "row": case.row,
        "temperature": case.temperature,
        "key": case.key,
    }
    tensors = {f"weights.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    for name in _OF_SEQUENCES:
        tensors[f"part.{name}"] = getattr(case.part, name).cpu().contiguous()
    if case.part.support:
        support = Support.join(case.part.support)
        tensors |= {"support.words": support.words, "support.counts": support.counts}
    answers = [tokens or () for tokens in case.call.tokens]
    tensors["call.tokens"] = torch.tensor([token for tokens in answers for token in tokens], dtype=torch.int64)
    tensors["call.lengths"] = torch.tensor([len(tokens) for tokens in answers], dtype=torch.int64)
    for side, logp_T in (("rollout", case.rollout_logp_T), ("learner", case.learner_logp_T)):
        assert logp_T is not None
        tensors[f"logp.{side}"] = logp_T.cpu().contiguous()
    write_atomically(path, save(tensors, {"mantissa_case": json.dumps(facts)}))


@dataclass(frozen=True)
class StoredCase:
    """What a file holds: a case, and what its two sides are made of. ``way``: the exact plan's, where it had one."""

    case: Case
    note: str
    model: ModelConfig
    precision: PrecisionPolicy
    way: Way | None
    weights: dict[str, Tensor]
    slots: int
    max_length: int


def read_case(path: Path | str) -> StoredCase:
    """The inverse of ``write_case``; a file that is none, or holds what does not fit together, is a ``MantissaError``.

    Files of version 1 hold neither the log-probs nor the tokens of batch mates, which are then sampled again.
    """
    from safetensors import SafetensorError

    what = f"{path}: expected the file that a run with precision.kernels=exact wrote at a mismatch"
    try:
        with open_tensors(Path(path)) as (metadata, stored_tensors):
            facts, tensors = parse_json(metadata["mantissa_case"]), dict(stored_tensors)
        if facts["version"] not in (1, _VERSION):
            raise MantissaError(
                f"{path}: written in version {facts['version']!r:.40} of this format, expected 1 or {_VERSION}; "
                "replay it with the version of Mantissa that wrote it"
            )
        stored = _parsed(facts, tensors)
        _check(stored)
    except MantissaError as error:
        raise error if str(error).startswith(str(path)) else MantissaError(f"{what} ({error!s:.300})") from None
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise MantissaError(f"{what} ({type(error).__name__}: {error!s:.300})") from None  # a file may hold anything
    return stored


def _parsed(facts: dict[str, Any], tensors: dict[str, Tensor]) -> StoredCase:
    requests = tuple(Request(tuple(r["prompt_tokens"]), int(r["seed"]), int(r["samples"])) for r in facts["requests"])
    params: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in facts["params"].items()}
    tokens_BT, prompt_B, length_B, mask_BR = (tensors[f"part.{name}"] for name in _OF_SEQUENCES)
    part = Sequences(tokens_BT, prompt_B, length_B, mask_BR)
    if "support.words" in tensors:
        support = Support(tensors["support.words"], tensors["support.counts"])
        lengths = (part.length_B - part.prompt_length_B).tolist()
        if not support.fits(part.response_tokens()[1].tolist(), int(facts["model"]["vocab_size"])):
            raise MantissaError("supports: they are not those of the responses")
        part = dataclasses.replace(part, support=tuple(support.split(lengths)))
    model = dict(facts["model"])
    if model["rope_scaling"] is not None:
        model["rope_scaling"] = RopeScaling(**model["rope_scaling"])
    if model.get("experts") is not None:
        experts = model["experts"]
        model["experts"] = ExpertsShape(**{**experts, "mlp_only_layers": tuple(experts["mlp_only_layers"])})
    engine, old = facts["engine"], facts["version"] == 1
    jobs, job, row = sum(request.samples for request in requests), int(facts["job"]), int(facts["row"])
    if not (0 < jobs <= _MOST and 0 <= job < jobs and 0 <= row < len(part)):
        raise MantissaError(f"sample {job} of {jobs}, row {row} of {len(part)}: there is none")
    case = Case(
        Call(requests, SamplingParams(**params), (None,) * jobs),
        job,
        part,
        row,
        float(facts["temperature"]),
        None if old else tensors["logp.rollout"],
        None if old else tensors["logp.learner"],
        None if old or facts["key"] is None else int(facts["key"]),
    )
    if old:  # the one response that is known
        tokens = (*(None,) * job, case.response, *(None,) * (jobs - job - 1))
        case = dataclasses.replace(case, key=case.call.keys[job])
    else:
        parts = tensors["call.tokens"].split(tensors["call.lengths"].tolist())
        tokens = tuple(tuple(part.tolist()) or None for part in parts)
    return StoredCase(
        dataclasses.replace(case, call=dataclasses.replace(case.call, tokens=tokens)),
        str(facts["note"]),
        ModelConfig(**model),
        PrecisionPolicy.parse(facts["precision"]),
        facts.get("way"),
        {name.removeprefix("weights."): t for name, t in tensors.items() if name.startswith("weights.")},
        int(engine["slots"]),
        int(engine["max_length"]),
    )


def _check(stored: StoredCase) -> None:
    """Raise ``MantissaError`` where the parts of a file do not fit together, before anything is built from them."""
    case, model, weights = stored.case, stored.model, stored.weights
    part, call, words = case.part, stored.case.call, model.vocab_size
    if not 0 < model.num_hidden_layers <= len(weights):
        raise MantissaError(f"{model.num_hidden_layers} layers, but only {len(weights)} weights")
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in Decoder(model).state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        found, wanted = weights.get(name), expected.get(name)
        if found is None or found.shape != wanted or found.dtype != torch.float32 or not bool(found.isfinite().all()):
            shown = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise MantissaError(f"weight {name}: expected {wanted and list(wanted)} finite fp32 numbers, found {shown}")
    check_requests(call.requests, dataclasses.replace(call.params, stop=()), words, stored.max_length, True)
    rows, width = part.tokens_BT.shape
    counted = torch.arange(part.mask_BR.shape[1]) < (part.length_B - part.prompt_length_B).unsqueeze(1)
    request = [r for r in call.requests for _ in range(r.samples)][case.job]
    shaped = [
        None if logp is None else (logp.dtype, *logp.shape) for logp in (case.rollout_logp_T, case.learner_logp_T)
    ]
    fits = {
        "way": stored.way in (None, *WAYS),
        "slots, max_length or max_tokens": 0 < stored.slots <= _MOST
        and 1 < stored.max_length <= model.max_position_embeddings
        and stored.slots * call.params.max_tokens <= 1 << 30,
        "temperature": math.isfinite(case.temperature) and case.temperature > 0,
        "part": {t.dtype for t in (part.tokens_BT, part.prompt_length_B, part.length_B)} == {torch.int64}
        and part.prompt_length_B.shape == part.length_B.shape == (rows,)
        and int(part.prompt_length_B.min()) > 0 and int(part.length_B.max()) <= width
        and torch.equal(part.mask_BR, counted) and bool((part.length_B >= part.prompt_length_B).all())
        and bool(counted[case.row].any())
        and int(part.tokens_BT.min()) >= 0 and int(part.tokens_BT.max()) < words,
        "answers": len(call.tokens) == sum(r.samples for r in call.requests)
        and all(len(t or ()) <= call.params.max_tokens for t in call.tokens)
        and all(0 <= token < words for t in call.tokens for token in t or ())
        and call.tokens[case.job] == case.response
        and tuple(part.tokens_BT[case.row, : len(request.prompt_tokens)].tolist()) == request.prompt_tokens,
        "log-probs": shaped in ([None, None], [(torch.float32, len(case.response))] * 2),
    }  # fmt: skip
    for what, good in fits.items():
        if not good:
            raise MantissaError(f"{what}: what it holds does not fit together")


def replay(stored: StoredCase, device: torch.device) -> tuple[Found, list[str]]:
    """Build both sides of a stored case on this machine and run them; returns the exact plan's lines too."""
    precision = resolve(stored.precision, device)
    model = Decoder(stored.model)
    model.load_state_dict(stored.weights)
    model = model.to(device)
    rows = max(stored.case.part.tokens_BT.numel(), stored.slots)
    plan = exact_plan(precision, model, device, stored.max_length, rows, stored.way or WAYS[0])
    engine = NativeEngine(
        stored.model,
        rollout_kernels(precision, plan),
        kv_format=precision.kv_cache.active,
        slots=stored.slots,
        max_length=stored.max_length,
        device=device,
    )
    engine.sync(dict(model.named_parameters()), 0)
    case = stored.case
    moved = {name: getattr(case.part, name).to(device) for name in _OF_SEQUENCES}
    part = Sequences(**moved, support=case.part.support)
    found = examine(engine, model, learner_kernels(precision, plan), dataclasses.replace(case, part=part))
    return found, plan.lines() if plan else []
