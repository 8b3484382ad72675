"""What a certificate holds, how it is read, and whether it agrees with itself.

A certificate says of one policy that the rollout engine, the rescoring and the update's own forward give each of some
sampled tokens one log-prob, or how far they are apart. It is not signed: whoever has the policy computes it again
(``mantissa certify --check``). So it holds all that this takes, the tokens among it, and log-probs as hexadecimal
floats, which lose no bit. What cannot be computed again are statements about the machine that made it: ``STATEMENTS``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
from pydantic import Field, ValidationError

from mantissa.base.bounds import LARGEST_SEED, Limits
from mantissa.base.config import Config, first_mistake
from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import read_json
from mantissa.doctor.sample import Tokens
from mantissa.mismatch.usual import usual

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA, VERSION = "mantissa certificate", 1
_LIMITS = Limits(64 << 20, 12, 2_000_000)
_TIED = ("lm_head.weight", "embed_tokens.weight")

# Fields that say something of the machine or the run that made a certificate, which nobody else can compute.
STATEMENTS: Mapping[str, str] = {
    "made": "when it was made",
    "policy.version": "the optimiser steps of the run that made the weights; the weights are known by their digest",
    "machine": "what computed it. Where it is said to be a machine as this one, bits are compared, else sizes",
}

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=2000)]
Token = Annotated[int, Field(ge=0)]


class Policy(Config):
    """``digest``: ``policy_digest``. ``version``: optimiser steps of the run, None of a model that is no run's."""

    digest: Digest
    version: Annotated[int, Field(ge=0)] | None
    architecture: Text
    layers: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    tensors: int = Field(ge=1)
    weights: int = Field(ge=1, le=1 << 50)


class Formats(Config):
    """``precision``: what was asked for, as a recipe says it. The others: what each part is in."""

    precision: dict[str, Any]
    emulate: tuple[Text, ...]
    learner: Text
    rollout: Text
    logits: Text
    kv_cache: Text


class Family(Config):
    """A side's kernels. ``emulated``: with a serving engine's habits."""

    exact: bool
    backend: Literal["native", "simulated"]
    emulated: bool


class KernelsUsed(Config):
    """``engine``: native, transformers' own code, or vLLM. ``plan``: the calls that exact kernels make here."""

    engine: Literal["native", "transformers", "vllm"]
    learner: Family
    rollout: Family
    plan: tuple[Text, ...]


class Machine(Config):
    """As ``base.provenance.stamp`` says it."""

    device: Text
    processor: Text
    flags: Text
    capability: Text
    settings: Text
    threads: int = Field(ge=1)
    libraries: dict[Text, Text]


class Sampling(Config):
    """How the tokens were drawn, of the whole vocabulary."""

    temperature: float = Field(gt=0)
    max_tokens: int = Field(ge=1)


class Sequence(Config):
    """Token ids, the seed of the draws, and each side's log-prob of each response token."""

    prompt: tuple[Token, ...] = Field(min_length=1)
    seed: int = Field(ge=0, le=LARGEST_SEED)
    response: tuple[Token, ...] = Field(min_length=1)
    rollout: tuple[Text, ...]
    rescoring: tuple[Text, ...]
    update: tuple[Text, ...]


class Digests(Config):
    """SHA-256 of the prompts' and of the responses' token ids."""

    prompts: Digest
    tokens: Digest


class Equal(Config):
    """How many log-probs differ from the rollout's in any bit, and by how much: root mean square of d / (1 - p), nats.

    ``usual``: the largest that rounding makes between these formats (``mismatch/usual.py``).
    """

    tokens: int = Field(ge=1)
    rescoring_differing: int = Field(ge=0)
    update_differing: int = Field(ge=0)
    rescoring_size: float = Field(ge=0)
    update_size: float = Field(ge=0)
    usual: float = Field(gt=0)

    @property
    def bits(self) -> bool:
        """Whether all three sides have the same."""
        return not (self.rescoring_differing or self.update_differing)

    @property
    def within(self) -> bool:
        """Whether what differs is of the usual size."""
        return max(self.rescoring_size, self.update_size) <= self.usual


class Injected(Config):
    """One bit that was turned in a copy, and what that changed: the comparison can fail.

    ``where``: a projection. ``index``: of the number in its weight, flat, or in its result. ``bit``: of its fp32
    pattern, from the lowest. ``before``, ``after``: the number, hexadecimal. ``changed`` of ``compared`` log-probs.
    """

    where: Text
    index: int = Field(ge=0, le=1 << 50)
    bit: int = Field(ge=0, le=31)
    before: Text
    after: Text
    changed: int = Field(ge=1)
    compared: int = Field(ge=1)


class Kept(Config):
    """What one rank of a verl job's learner kept of a step's first update (``+trainer.certify``, ``verl/kept.py``).

    ``model``: the policy that the job began with. ``precision``: as a recipe says it. ``threads``: torch's, there.
    """

    kept: Literal["mantissa kept batch"]
    version: Literal[1]
    step: int = Field(ge=1)
    model: Text
    precision: dict[str, Any]
    threads: int = Field(ge=1)
    sampling: Sampling
    sequences: tuple[Sequence, ...] = Field(min_length=1)


class Certificate(Config):
    """See the module."""

    certificate: Literal["mantissa certificate"]
    version: Literal[1]
    made: Text
    policy: Policy
    formats: Formats
    kernels: KernelsUsed
    machine: Machine
    sampling: Sampling
    sequences: tuple[Sequence, ...] = Field(min_length=1)
    digests: Digests
    equal: Equal
    injected_weight: Injected | None
    injected_result: Injected | None

    @property
    def exact(self) -> bool:
        """Whether bits were promised: exact kernels, on both sides."""
        return self.kernels.learner.exact and self.kernels.engine != "vllm"


def read_certificate(path: Path) -> Certificate:
    """The certificate in a file. ``MantissaError``: it is none, truncated, of another version, or beyond bounds."""
    made = _read(path, Certificate, "certificate", "the file that mantissa certify --out wrote", "mantissa certify")
    assert isinstance(made, Certificate)
    return made


def read_kept(folder: Path) -> Kept:
    """What all ranks of a job kept of a step, in ``folder``. ``MantissaError``: as ``read_certificate``, and files of
    two jobs."""
    found: list[Kept] = []
    for path in sorted(folder.glob("rank-*.json")):
        each = _read(path, Kept, "kept", "what a verl job kept by +trainer.certify", "+trainer.certify")
        assert isinstance(each, Kept)
        found.append(each)
    if not found:
        raise MantissaError(f"{folder}: nothing was kept there; run the job with +trainer.certify=STEP up to that step")
    first, sequences = found[0], tuple(sequence for each in found for sequence in each.sequences)
    if any(each.model_copy(update={"sequences": first.sequences}) != first for each in found):
        raise MantissaError(f"{folder}: its ranks are of two jobs; delete it, and run the job again")
    return first.model_copy(update={"sequences": sequences})


def _read(path: Path, kind: type[Certificate | Kept], name: str, expected: str, maker: str) -> Certificate | Kept:
    again = f"make it again with {maker}"
    found = read_json(path, again, _LIMITS)
    (word,) = get_args(kind.model_fields[name].annotation)
    if not isinstance(found, dict) or found.get(name) != word:
        raise MantissaError(f"{path}: no {word.removeprefix('mantissa ')}; expected {expected}")
    if found.get("version") != VERSION:
        said = f"{found.get('version')!r:.40}"
        raise MantissaError(
            f"{path}: a {word.removeprefix('mantissa ')} in version {said} of its schema, and this is version "
            f"{VERSION}; {again}, or use the Mantissa that made it"
        )
    try:
        made = kind(**found)
        for each in made.sequences:
            _check_numbers(each)
    except ValidationError as error:
        name, text, _ = first_mistake(error, kind.model_fields)
        raise MantissaError(f"{path}: {name}: {text:.300}; {again}") from None
    except ValueError as error:
        raise MantissaError(f"{path}: {error!s:.300}; {again}") from None
    return made


def hexed(logp: Iterable[float]) -> tuple[str, ...]:
    """Log-probs as hexadecimal floats."""
    return tuple(float(each).hex() for each in logp)


def unhexed(texts: Iterable[str]) -> list[float]:
    """The inverse. ``ValueError`` for what ``hexed`` does not write: another spelling, no fp32 number, none at all."""
    found = []
    for text in texts:
        value = float.fromhex(text)
        if value.hex() != text or not value <= 0 or struct.unpack("<f", struct.pack("<f", value))[0] != value:
            raise ValueError(f"{text!r:.60} is no log-prob in fp32, hexadecimal")
        found.append(value)
    return found


def _check_numbers(each: Sequence) -> None:
    for name in ("rollout", "rescoring", "update"):
        try:
            count = len(unhexed(getattr(each, name)))
        except OverflowError:
            raise ValueError(f"{name}: a number beyond fp32") from None
        if count != len(each.response):
            raise ValueError(f"{count} log-probs of {name} for {len(each.response)} tokens")


def digests_of(sequences: Iterable[Sequence]) -> Digests:
    """Of the token ids, a line of decimal numbers a sequence."""
    made = {"prompts": hashlib.sha256(), "tokens": hashlib.sha256()}
    for each in sequences:
        made["prompts"].update(f"{' '.join(map(str, each.prompt))}\n".encode())
        made["tokens"].update(f"{' '.join(map(str, each.response))}\n".encode())
    return Digests(**{name: digest.hexdigest() for name, digest in made.items()})


def policy_digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, shape and fp32 values of each whole tensor, in the order of names; hexadecimal.

    It does not depend on how the tensors are laid out, in which wider format they are held, or whether a head that is
    the embedding is stored beside it. Whoever forges a certificate may choose the weights, so this is a hash for that;
    ``base/tensors.py``'s, which adds over ranks, tells an accident alone.
    """
    head, table = (next((w for n, w in weights.items() if n.endswith(end)), None) for end in _TIED)
    tied = head is not None and table is not None and head.shape == table.shape and bool((head == table).all())
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        if tied and name.endswith(_TIED[0]):
            continue
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().float().contiguous().numpy().data)
    return digest.hexdigest()


def size_of(one: list[float], other: list[float]) -> float:
    """Root mean square of d / (1 - p) over tokens that are not certain, nats (``doctor/sample.py``)."""
    x, y = np.array(one), np.array(other)
    none = np.zeros(len(x), dtype=np.int64)
    return Tokens(x, y, none, none, none, none).size


def equal_of(sequences: Iterable[Sequence], formats: Iterable[str | None], temperature: float) -> Equal:
    """What the log-probs of ``sequences`` say."""
    sides: dict[str, list[str]] = {"rollout": [], "rescoring": [], "update": []}
    for each in sequences:
        for name, texts in sides.items():
            texts += getattr(each, name)
    rollout, numbers = sides["rollout"], {name: unhexed(texts) for name, texts in sides.items()}
    found: dict[str, Any] = {}
    for name in ("rescoring", "update"):
        found[f"{name}_differing"] = sum(a != b for a, b in zip(rollout, sides[name], strict=True))
        found[f"{name}_size"] = size_of(numbers["rollout"], numbers[name])
    return Equal(tokens=len(rollout), usual=usual(formats, temperature).bound, **found)


def contradictions(certificate: Certificate) -> Iterator[tuple[str, str]]:
    """Fields that what the certificate itself holds does not bear out, each with what it would have to be."""
    formats, sampling = certificate.formats, certificate.sampling
    made = digests_of(certificate.sequences)
    for name in ("prompts", "tokens"):
        if getattr(made, name) != getattr(certificate.digests, name):
            yield f"digests.{name}", f"the token ids have the digest {getattr(made, name)}"
    equal = equal_of(certificate.sequences, (formats.learner, formats.rollout), sampling.temperature)
    for name, value in equal:
        if value != getattr(certificate.equal, name):
            yield f"equal.{name}", f"the log-probs in it make it {value:g}"
    longest = max(len(each.response) for each in certificate.sequences)
    if longest > sampling.max_tokens:
        yield "sampling.max_tokens", f"a response has {longest} tokens"
