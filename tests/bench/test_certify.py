"""Certificates: what they hold is what is so, and each field that is forged is found out, or is called a statement."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from mantissa.base.errors import MantissaError
from mantissa.bench import certify as program
from mantissa.bench import sides
from mantissa.bench.certificate import (
    STATEMENTS,
    Certificate,
    Injected,
    Kept,
    policy_digest,
    read_certificate,
    unhexed,
)
from mantissa.bench.certify import Checked, certify, check, findings_of
from mantissa.bench.sides import asked_of, open_policy_of, prompts_of
from mantissa.model import Decoder, ModelConfig, byte_tokenizer, save_model

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "family": "llama", "vocab_size": 258, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip


def quiet(_: str) -> None:
    """What is at work."""


def saved(folder: Path, seed: int = 0, **shape: Any) -> str:
    model = Decoder(ModelConfig(**{**SHAPE, **shape})).initialize(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # so that log-probs tell positions apart
    save_model(model, byte_tokenizer(), folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def _probed_once() -> Iterator[None]:
    """What is found by probing is found once: what is tried here is what becomes of it."""
    plan, prove = sides.exact_plan, sides.prove
    known: dict[str, Any] = {}

    def once(of: Callable[..., Any], name: str, precision: Any, *rest: Any) -> Any:
        how = (precision.policy, precision.rollout.kernels, torch.get_num_threads())
        key = f"{name} {how} {rest[2:] if name == 'plan' else ''}"
        if key not in known:
            known[key] = of(precision, *rest)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sides, "exact_plan", functools.partial(once, plan, "plan"))
        patched.setattr(sides, "prove", functools.partial(once, prove, "prove"))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def made(folder: str) -> Certificate:
    return certified(folder)


def certified(path: str, pair: str | None = None) -> Certificate:
    opened = open_policy_of(path)
    return certify(opened, asked_of(opened, pair, 6), prompts_of(opened, None, 3), 18, CPU, quiet)


def checked(made: Certificate, path: str, tokens: int = 1000, allow_gap: bool = False) -> Checked:
    return check(made, path, tokens, CPU, quiet, allow_gap)


def test_three_sides_are_equal_and_a_bit_is_seen(made: Certificate, folder: str) -> None:
    assert made.equal.bits
    assert made.equal.tokens >= 18
    assert made.kernels.plan
    assert made.injected_weight
    assert made.injected_result
    assert all(each.holds for each in findings_of(made, allow_gap=False))
    found = checked(made, folder)
    assert found.holds, found
    assert found.bits
    assert found.recomputed == found.tokens == made.equal.tokens
    some = checked(made, folder, tokens=1)
    assert some.holds
    assert some.recomputed < some.tokens


def leaves(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every field of the schema that holds no others, as a path; of a tuple its first."""
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        inner = [each for each in typing.get_args(kind) if each is not Ellipsis] or [kind]
        parts = [each for each in inner if isinstance(each, type) and issubclass(each, BaseModel)]
        first = ".0" if typing.get_origin(kind) is tuple and parts else ""
        if parts and not isinstance(kind, types.UnionType | type):
            yield from leaves(parts[0], f"{before}{name}{first}.")
        elif parts:
            yield from leaves(parts[0], f"{before}{name}.")
        else:
            yield f"{before}{name}"


LEAVES = tuple(leaves(Certificate))


def test_the_schema_has_the_fields_that_are_forged() -> None:
    assert {"policy.digest", "sequences.0.rollout", "machine.threads", "injected_weight.bit"} <= set(LEAVES)
    assert len(LEAVES) > 45


def forged(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, list):
        return [forged(value[0]), *value[1:]] if value else ["x"]
    if isinstance(value, dict):
        name = next(iter(value))
        return {**value, name: forged(value[name])}
    if value is None:
        return 7
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        if value.startswith(("-0x", "0x")):
            near = np.nextafter(np.float32(float.fromhex(value)), np.float32(-np.inf))
            return float(near).hex()
        return ("0" if value[:1] != "0" else "1") + value[1:]
    return value + 4096  # threads too: more than any machine here has, so that none are set


@pytest.mark.parametrize("path", LEAVES)
def test_a_forged_field_is_found_out_or_is_a_statement(
    path: str, made: Certificate, folder: str, tmp_path: Path
) -> None:
    content = json.loads(made.model_dump_json())
    *way, last = path.split(".")
    at = content
    for name in way:
        at = at[int(name)] if name.isdigit() else at[name]
    at[last] = forged(at[last])
    file = tmp_path / "forged.json"
    file.write_text(json.dumps(content))
    stated = any(path == each or path.startswith(f"{each}.") for each in STATEMENTS)
    try:
        found = checked(read_certificate(file), folder)
    except MantissaError:
        assert not stated, path
        return
    assert found.holds is stated, found.findings
    if path.startswith("machine.") and path != "machine.threads":
        assert not found.bits


KEPT = tuple(leaves(Kept))


def kept_of(made: Certificate, model: str) -> Kept:
    """What a verl job keeps of its first step, whose log-probs are a certificate's."""
    return Kept(
        kept="mantissa kept batch", version=1, step=1, model=model, precision=made.formats.precision,
        threads=torch.get_num_threads(), sampling=made.sampling, sequences=made.sequences,
    )  # fmt: skip


def job_of(folder: Path, *ranks: Kept | str) -> str:
    """The folder of a job's checkpoints, in which each rank kept its part."""
    for number, each in enumerate(ranks):
        file = folder / "certify" / "step-1" / f"rank-{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(each if isinstance(each, str) else each.model_dump_json())
    return str(folder)


def test_a_job_is_certified_by_what_it_kept(made: Certificate, folder: str, tmp_path: Path) -> None:
    """As the model it began with, which gives the same: so each field that is forged in one is in the other."""
    kept = kept_of(made, folder)
    halves = [kept.model_copy(update={"sequences": each}) for each in (made.sequences[:1], made.sequences[1:])]
    job = job_of(tmp_path, *halves)
    opened = open_policy_of(job)
    found = certify(opened, asked_of(opened, None, None), prompts_of(opened, None, 3), 1000, CPU, quiet)
    own = {"made": made.made, "policy": made.policy.model_copy(update={"version": 0})}
    assert found.model_copy(update={"made": made.made}) == made.model_copy(update=own)
    assert checked(found, job).holds
    for how in (("bf16", None), (None, 7)):
        with pytest.raises(MantissaError, match="a verl job has its own"):
            asked_of(opened, *how)
    with pytest.raises(MantissaError, match="a verl job is certified by the batch that it kept"):
        prompts_of(opened, tmp_path, 3)


@pytest.mark.parametrize("path", KEPT)
def test_what_a_job_kept_and_somebody_forged_is_not_certified(
    path: str, made: Certificate, folder: str, tmp_path: Path
) -> None:
    content = json.loads(kept_of(made, folder).model_dump_json())
    *way, last = path.split(".")
    at = content
    for name in way:
        at = at[int(name)] if name.isdigit() else at[name]
    at[last] = forged(at[last])
    with contextlib.ExitStack() as stack:
        if path != "threads":  # more of them than there are here change nothing
            stack.enter_context(pytest.raises(MantissaError))
        opened = open_policy_of(job_of(tmp_path, json.dumps(content)))
        found = certify(opened, asked_of(opened, None, None), prompts_of(opened, None, 3), 1000, CPU, quiet)
        assert found.equal == made.equal


def test_ranks_of_two_jobs(made: Certificate, folder: str, tmp_path: Path) -> None:
    kept = kept_of(made, folder)
    with pytest.raises(MantissaError, match="its ranks are of two jobs"):
        open_policy_of(job_of(tmp_path, kept, kept.model_copy(update={"threads": 9})))


@pytest.mark.parametrize("nats", [1e-6, 1.0])
def test_all_sides_forged_alike(nats: float, made: Certificate, folder: str) -> None:
    """Bits tell on the machine that it says; where it says another, only the size does."""
    by = {
        name: tuple(float(np.float32(x - nats)).hex() for x in unhexed(made.sequences[0].rollout))
        for name in ("rollout", "rescoring", "update")
    }
    sequences = (made.sequences[0].model_copy(update=by), *made.sequences[1:])
    found = checked(made.model_copy(update={"sequences": sequences}), folder)
    named = {each.field for each in found.findings if each.holds is False}
    assert {"sequences.rollout", "sequences.rescoring", "sequences.update"} <= named
    machine = made.machine.model_copy(update={"processor": "another"})
    elsewhere = checked(made.model_copy(update={"sequences": sequences, "machine": machine}), folder)
    assert elsewhere.holds is (nats < 0.1), elsewhere
    assert not elsewhere.bits


def test_another_policy(made: Certificate, tmp_path: Path) -> None:
    found = checked(made, saved(tmp_path / "other", seed=1))
    assert [each.field for each in found.findings if each.holds is False] == ["policy.digest"]
    assert found.recomputed == 0
    found = checked(made, saved(tmp_path / "shape", num_hidden_layers=1))
    assert {"policy.digest", "policy.layers", "policy.weights"} <= {e.field for e in found.findings if not e.holds}


def test_what_differs_is_certified_by_its_size_alone(folder: str) -> None:
    made = certified(folder, "bf16+serving")
    assert not made.equal.bits
    assert made.equal.within
    assert [each.field for each in findings_of(made, allow_gap=False) if not each.holds] == ["equal"]
    assert all(each.holds for each in findings_of(made, allow_gap=True))
    found = checked(made, folder, allow_gap=True)
    assert found.holds, found
    assert not found.bits
    assert not checked(made, folder).holds
    large = made.equal.model_copy(update={"update_size": 9.0})
    assert not findings_of(made.model_copy(update={"equal": large}), allow_gap=True)[1].holds


def test_a_bit_that_nobody_saw_does_not_certify(
    made: Certificate, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = made.model_copy(update={"injected_weight": None})
    assert not all(each.holds for each in findings_of(blind, allow_gap=False))
    assert not checked(blind, folder).holds
    monkeypatch.setattr(program, "_with_bit", lambda tensor, bit: (tensor.detach().clone(), {}))
    assert not checked(made, folder).holds


def test_one_bit_is_one_bit() -> None:
    for bit in range(32):
        after = np.float32(program.turned(1.5, bit))
        pattern = np.float32(1.5).view(np.uint32) ^ after.view(np.uint32)
        assert pattern == 1 << bit or math.isnan(after)
    assert Injected.model_fields.keys() >= {"before", "after", "bit"}


def test_the_digest_is_of_values_whatever_their_layout() -> None:
    w = torch.arange(12.0).view(3, 4)
    table, head = torch.ones(5, 4), torch.ones(5, 4)
    plain = policy_digest({"b": w, "a.embed_tokens.weight": table})
    assert plain == policy_digest({"a.embed_tokens.weight": table.bfloat16(), "b": w.T.contiguous().T})
    assert plain == policy_digest({"a.embed_tokens.weight": table, "b": w, "lm_head.weight": head})
    assert plain != policy_digest({"a.embed_tokens.weight": table, "b": w, "lm_head.weight": head + 1})
    assert plain != policy_digest({"a.embed_tokens.weight": table, "b": w.view(4, 3)})
    assert plain != policy_digest({"a.embed_tokens.weight": table, "c": w})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON"),
        ("[" * 5000, "not valid JSON"),
        ('{"certificate": "mantissa certificate", "version": 2}', "version 2 of its schema"),
        ('{"certificate": "mantissa certificate", "version": "\\u001b[2J"}', r"\\x1b"),
        ("[]", "no certificate"),
        ('{"certificate": "mantissa certificate", "version": 1}', "expected this key, which is not there"),
        ('{"a": ' * 50 + "1" + "}" * 50, "not valid JSON"),
    ],
)
def test_what_is_no_certificate_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "cert.json"
    file.write_text(text)
    with pytest.raises(MantissaError, match=said) as caught:
        read_certificate(file)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_certificate(share: float, made: Certificate, tmp_path: Path) -> None:
    text = made.model_dump_json(indent=1)
    (tmp_path / "cert.json").write_text(text[: int(len(text) * share)])
    with pytest.raises(MantissaError, match="not valid JSON"):
        read_certificate(tmp_path / "cert.json")


@pytest.mark.parametrize("number", ["nan", "inf", "0x1p+200", "-0x1.00000001p-3", "1", "", "0x1p+0", "-0x1p"])
def test_numbers_that_are_no_log_prob(number: str, made: Certificate, tmp_path: Path) -> None:
    content = json.loads(made.model_dump_json())
    content["sequences"][0]["update"][0] = number
    (tmp_path / "cert.json").write_text(json.dumps(content))
    with pytest.raises(MantissaError, match=r"log-prob|fp32|floating"):
        read_certificate(tmp_path / "cert.json")


def test_where_vllm_is_not_installed_our_engine_stands_in_for_it_and_a_finding_says_so(folder: str) -> None:
    made = certified(folder, "bf16")
    by_vllm = made.model_copy(update={"kernels": made.kernels.model_copy(update={"engine": "vllm"})})
    assert not by_vllm.exact
    found = checked(by_vllm, folder, allow_gap=True)
    (engine,) = (each for each in found.findings if each.field == "kernels.engine")
    assert found.holds
    assert not found.bits
    assert (engine.holds, "vLLM is not installed here" in engine.said) == (None, True)
