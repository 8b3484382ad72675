"""Models of transformers under our kernels: equal to the bit in any batch, trained as before, and left as they were."""

import copy

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, REFUSED, VOCABULARY, make

import mantissa
from mantissa.adopted import attention, recurrence, route
from mantissa.base.errors import MantissaError
from mantissa.kernels.simulated import activation_values, weight_values
from mantissa.precision import FP32

KINDS = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_5_text", "lfm2", "mixtral", "gpt2"]


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: transformers' own code mixes dtypes."""


def batch(rows=3, length=40, pad=7):
    """Tokens and their mask; the second row begins with padding, or ends with it where ``pad`` is negative."""
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, slice(pad) if pad >= 0 else slice(pad, None)] = 0
    return tokens, mask


def logits(model, tokens, mask):
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits


def loss(model, tokens, mask, **more):
    out = model(input_ids=tokens, attention_mask=mask, use_cache=False, **more).logits[:, :-1]
    logp = torch.log_softmax(out, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (logp * mask[:, 1:]).sum()


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_exact_near_its_own_and_left_as_it_was(name):
    model, (tokens, mask) = make(name), batch()
    kind, before = type(model), logits(model, tokens, mask)
    adopted = mantissa.adopt(model, length=256)  # which compares its batches, paddings, orders and decoding
    assert isinstance(model, kind)
    assert "logits equal" in adopted.lines[-1]
    routed, real = logits(model, tokens, mask), mask.bool()
    assert torch.allclose(routed[real], before[real], rtol=1e-3, atol=2e-4 * float(before[real].abs().max()))
    adopted.release()
    assert type(model) is kind
    assert "_adopted" not in vars(model)
    assert torch.equal(logits(model, tokens, mask), before)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_in_fp32_compute_as_a_model_in_the_half_format_does(name, precision):
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    masters, loaded = make(name), make(name, half)
    for model, given in ((masters, precision), (loaded, None)):
        assert "logits equal" in mantissa.adopt(model, given, length=256).lines[-1]
    tokens, mask = batch()
    one, two = logits(masters, tokens, mask), logits(loaded, tokens, mask)
    assert one.dtype is two.dtype is torch.float32
    assert torch.equal(one[mask.bool()], two[mask.bool()])
    loss(masters, tokens, mask).backward()
    grads = [p.grad for p in masters.parameters() if p.grad is not None]
    assert all(g.dtype is torch.float32 and bool(g.isfinite().all()) for g in grads)
    assert len(grads) > 10


@pytest.mark.parametrize("name", [*KINDS, "bamba"])
def test_gradients_are_as_near_to_float64_as_torchs_own(name):
    model, (tokens, mask) = make(name), batch(pad=-7)  # torch's own gives NaN to padding on the left

    def gradients(of):
        loss(of, tokens, mask).backward()
        return [p.grad.double() for p in of.parameters() if p.grad is not None]

    exact = gradients(copy.deepcopy(model).double())
    own = gradients(copy.deepcopy(model))
    mantissa.adopt(model, length=256)
    routed = gradients(model)

    def error(found):
        return max(float((g - e).norm() / (e.norm() + 1e-12)) for g, e in zip(found, exact, strict=True))

    assert len(routed) == len(exact)
    assert error(routed) < 5 * error(own) + 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "qwen3_5_text"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_computed_again_by_the_same_kernels(name, reentrant):
    model, (tokens, mask) = make(name), batch()
    for dropout in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout"):
        setattr(model.config, dropout, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    mantissa.adopt(model, length=256)
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model.train()
        if reentrant:
            model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.requires_grad_())
        total = loss(model, tokens, mask)
        total.backward()
        results.append((total.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (one, plain), (two, again) = results
    assert torch.equal(one, two)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_copy_is_adopted_too_and_no_other_model_is():
    model, other, (tokens, mask) = make("llama"), make("llama"), batch()
    before = logits(other, tokens, mask)
    with mantissa.adopt(model, length=256):
        routed, twin = logits(model, tokens, mask), copy.deepcopy(model)
        assert torch.equal(logits(twin, tokens, mask), routed)
        assert torch.equal(logits(other, tokens, mask), before)
        assert not torch.equal(routed, before)
        with torch.no_grad():
            twin.model.norm.weight.mul_(2)
        assert torch.equal(logits(model, tokens, mask), routed)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_generate_samples_has_the_learners_log_probs(name, precision):
    model, (tokens, mask) = make(name), batch(length=12, pad=5)
    mantissa.adopt(model, precision, length=256)
    for _ in range(2):  # the second time with other weights: what generate keeps of them is not kept beyond it
        out = model.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=30, min_new_tokens=30, do_sample=True,
            output_logits=True, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        sampled = torch.stack(out.logits, 1)
        whole = torch.cat((mask, torch.ones(3, 30, dtype=torch.long)), 1)
        assert torch.equal(sampled, logits(model, out.sequences, whole)[:, 11:-1])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)


def test_it_holds_with_two_threads_and_rows_that_they_share():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        model = make("gemma2", hidden_size=520, intermediate_size=776)
        adopted = mantissa.adopt(model, length=256)
        tokens, mask = batch(rows=8, length=96)
        two = logits(model, tokens, mask)
        torch.set_num_threads(1)
        if "1 and 2 threads" in str(adopted):
            assert torch.equal(logits(model, tokens, mask), two)
        else:  # a processor on which sums depend on their number: then another one is refused
            assert "2 threads" in str(adopted)
            with pytest.raises(MantissaError, match="proven for 2 threads"):
                logits(model, tokens, mask)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8, 16, 64])
def test_a_padded_length_gives_each_thread_whole_vectors(threads):
    for count in (1, 63, 64, 2047, 2049, 32767, 32769, 100_001, 1_000_003):
        length = route.padded_length(count, threads)
        assert count <= length < count + 64 * threads**2 + 64
        for grain in (2048, 32768):
            parts = min(threads, -(-length // grain))
            share = -(-length // parts)
            assert share % 64 == 0


def test_a_model_whose_keys_are_laid_out_wrongly_is_refused_by_its_first_module(monkeypatch):
    monkeypatch.setattr(attention.Place, "first", lambda self, keys: [0] * len(self.left))
    with pytest.raises(MantissaError, match=r"from model\.layers\.0\.self_attn"):
        mantissa.adopt(make("llama"), length=256)


def test_an_operation_without_a_route_is_refused_by_its_name_and_module(monkeypatch):
    monkeypatch.delitem(route.ROUTES, F.silu)
    model = make("llama")
    kind = type(model)
    with pytest.raises(MantissaError, match=r"model\.layers\.0\.mlp.* calls silu"):
        mantissa.adopt(model, length=256)
    assert type(model) is kind
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_form_is_refused_by_its_name(name):
    with pytest.raises(MantissaError, match=REFUSED[name][1]):
        mantissa.adopt(make(name), length=256)


def refused(change):
    model = make("llama")
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "no model of transformers"),
        (lambda: make("llama").model, "no causal language model"),
        (lambda: make("bert"), "keeps no cache"),
        (lambda: refused(lambda m: setattr(m.config, "quantization_config", {"bits": 4})), "quantised checkpoint"),
        (lambda: refused(lambda m: setattr(m.config, "vision_config", {})), "vision"),
        (lambda: refused(lambda m: m.lm_head.double()), "float32, float64"),
        (
            lambda: refused(lambda m: setattr(m, "__class__", type("Own", (type(m),), {"__module__": "mine"}))),
            "own code",
        ),
        (lambda: refused(lambda m: mantissa.adopt(m, length=256)), "release it first"),
    ],
)
def test_what_cannot_be_adopted_is_told_in_one_line(model, message):
    with pytest.raises(MantissaError, match=message) as told:
        mantissa.adopt(model())
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("e8m4", "expected fp32, bf16"),
        (mantissa.PrecisionPolicy(train="fp32", rollout="bf16"), "one format"),
    ],
)
def test_a_precision_that_one_model_cannot_have_is_refused(precision, message):
    with pytest.raises(MantissaError, match=message):
        mantissa.adopt(make("llama"), precision)
    with pytest.raises(MantissaError, match="load the model in fp32"):
        mantissa.adopt(make("llama", torch.bfloat16), "fp16")


def test_calls_whose_rows_are_not_known_are_refused():
    from transformers import StaticCache

    model, (tokens, mask) = make("llama"), batch()
    mantissa.adopt(model, length=64)
    whole = torch.ones(3, 1, 40, 40, dtype=torch.bool).tril()
    calls = [
        ({"attention_mask": whole}, "made by hand"),
        ({"attention_mask": mask[:, :30]}, "3 rows by 40 columns"),
        ({"position_ids": torch.arange(40).remainder(20).expand(3, 40)}, "several sequences"),
        ({"past_key_values": StaticCache(model.config, 64)}, "StaticCache"),
    ]
    for given, message in calls:
        with pytest.raises(MantissaError, match=message):
            model(input_ids=tokens, **given)
    with pytest.raises(MantissaError, match=r"128 positions at most.*length=140"):
        logits(model, tokens.repeat(1, 4)[:, :140], None)
    model.train()
    model.config.attention_dropout = 0.1
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.raises(MantissaError, match="drops out values"):
        model(input_ids=tokens)


def test_a_layer_called_by_itself_is_refused():
    model = make("llama")
    mantissa.adopt(model, length=64)
    with pytest.raises(MantissaError, match="by itself"):
        model.model.layers[0].self_attn(
            torch.zeros(1, 4, 64), position_embeddings=(torch.ones(1, 4, 16), torch.ones(1, 4, 16)), attention_mask=None
        )


def test_an_adapter_that_is_added_later_is_refused_and_one_before_is_adopted():
    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down = base, torch.nn.Linear(base.in_features, 4, bias=False)
            self.up = torch.nn.Linear(4, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model, later, (tokens, mask) = make("llama"), make("llama"), batch()
    mantissa.adopt(later, length=128)
    for each in (model, later):
        layer = each.model.layers[0].self_attn
        layer.q_proj = Adapted(layer.q_proj)
    mantissa.adopt(model, length=128)
    alone = logits(model, tokens[1:2, 7:], None)
    assert torch.equal(logits(model, tokens, mask)[1, 7:], alone[0])
    with pytest.raises(MantissaError, match="add adapters first"):
        logits(later, tokens, mask)


def test_autocast_and_a_forward_of_somebody_elses_are_refused():
    model, patched, (tokens, mask) = make("llama"), make("llama"), batch()
    patched.forward = patched.forward
    with pytest.raises(MantissaError, match="has been replaced"):
        mantissa.adopt(patched, length=128)
    mantissa.adopt(model, length=128)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(MantissaError, match="autocast is on"):
        logits(model, tokens, mask)


def test_what_is_changed_after_the_adoption_is_refused_by_its_name():
    tokens, mask = batch()
    for change, said in (
        (lambda model: model.set_attn_implementation("sdpa"), "_attn_implementation_internal"),
        (lambda model: model.set_experts_implementation("grouped_mm"), "_experts_implementation_internal"),
        (lambda model: model.bfloat16(), "dtype=bfloat16"),
    ):
        model = make("mixtral")
        mantissa.adopt(model, length=128)
        change(model)
        with pytest.raises(MantissaError, match=said):
            logits(model, tokens, mask)


def test_a_weight_that_changes_while_copies_are_kept_is_copied_anew():
    model, (tokens, mask) = make("llama"), batch()
    adopted = mantissa.adopt(model, "bf16", length=128)
    with adopted.keeping():
        before = logits(model, tokens, mask)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
        after = logits(model, tokens, mask)
    assert not torch.equal(before, after)
    assert torch.equal(after, logits(model, tokens, mask))


@pytest.mark.parametrize("scheme", ["fp8", "mxfp8", "int8", "int4"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gemma2"])
def test_quantised_products_are_those_of_the_codes_and_exact(name, scheme):
    model, (tokens, mask) = make(name), batch()
    fp8 = mantissa.resolve(mantissa.PrecisionPolicy(train=scheme, rollout=scheme), "cpu").learner.fp8
    seen = {}
    layer = model.model.layers[0].self_attn.o_proj
    layer.register_forward_hook(lambda _, args, out: seen.update({"o": (args[0], out)}))
    adopted = mantissa.adopt(model, scheme, length=128)
    assert scheme in adopted.lines[0]
    assert "logits equal" in adopted.lines[-1]
    seen.clear()
    loss(model, tokens, mask).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    x, out = (each.detach().float() for each in seen["o"])
    values = activation_values(x, fp8), weight_values(layer.weight.detach(), fp8)
    bias = 0 if layer.bias is None else layer.bias.detach().bfloat16().float()
    expected = F.linear(*values) + bias
    assert torch.allclose(out, expected, rtol=2**-7, atol=1e-6)
    assert not torch.allclose(out, F.linear(x, layer.weight.detach()) + bias, rtol=2**-7, atol=1e-6)
    sampled = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    whole = torch.cat((mask, torch.ones(3, 8, dtype=torch.long)), 1)
    assert torch.equal(torch.stack(sampled.logits, 1), logits(model, sampled.sequences, whole)[:, 39:-1])
    twin = copy.deepcopy(model)
    with pytest.raises(MantissaError, match="is adopted itself"):  # its weights are others, and none is quantised
        logits(twin, tokens, mask)
    adopted.knows(twin)
    assert torch.equal(logits(twin, tokens, mask), logits(model, tokens, mask))


def _recurrences():
    """A name, and a call with few numbers."""
    draw = torch.Generator().manual_seed(2)

    def some(*shape):
        return torch.randn(shape, generator=draw)

    def by_file(query, key, value, g, beta, **_):
        state, found = torch.zeros(2, 2, 4, 3), []
        for at in range(5):
            k, v = key[:, at], value[:, at]
            state = state * g[:, at, :, None, None].exp()
            delta = (v - (state * k[..., None]).sum(-2)) * beta[:, at, :, None]
            state = state + k[..., None] * delta[..., None, :]
            found.append((state * query[:, at, :, :, None]).sum(-2) / 2)
        return torch.stack(found, 1), None

    b, c, dt, a = some(2, 5, 1, 4), some(2, 5, 1, 4), some(2, 5, 2).exp(), -some(2).exp()
    query, key, value, g, beta = (
        some(2, 5, 2, 4),
        some(2, 5, 2, 4),
        some(2, 5, 2, 3),
        -some(2, 5, 2).exp(),
        some(2, 5, 2),
    )
    flat = some(2, 3, 5), some(2, 3, 5).exp(), -some(3, 4).exp(), some(2, 4, 5), some(2, 4, 5)
    return {
        "delta": lambda: recurrence._delta_rule(by_file, query, key, value, g, beta)[0],
        "mamba2": lambda: recurrence._mamba2_scan(some(2, 5, 2, 3) * 0 + 1, dt, a, b, c),
        "mamba": lambda: recurrence._mamba_scan(*flat),
    }


@pytest.mark.parametrize("name", ["delta", "mamba2", "mamba"])
def test_a_recurrence_sums_as_its_model_was_adopted_wherever_its_tensors_lie(name, monkeypatch):
    """For a GPU by the routes' kernels, also where those are interpreted on a CPU; else by torch's own row sums."""
    call, entered, stepping = _recurrences()[name], [], recurrence._stepping
    monkeypatch.setattr(recurrence, "_stepping", lambda: entered.append(name) or stepping())
    found = []
    for gpu in (False, True):
        monkeypatch.setattr(route.RUNNING, "modes", [route.Routed(FP32, cast=False, gpu=gpu)])
        entered.clear()
        with torch.no_grad():
            found.append(call())
        assert bool(entered) is not gpu
    assert torch.allclose(*found, rtol=1e-5, atol=1e-6)


def test_a_router_is_never_quantised():
    model, (tokens, mask) = make("mixtral"), batch()
    mantissa.adopt(model, "int4", length=128)
    seen = []
    gate = model.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    logits(model, tokens, mask)
    x, out = seen[0][0].float(), (seen[0][1][0] if isinstance(seen[0][1], tuple) else seen[0][1])
    assert torch.allclose(out.float(), F.linear(x, gate.weight.bfloat16().float()), rtol=2**-6, atol=1e-2)


def test_a_model_without_a_layer_to_quantise_is_refused():
    with pytest.raises(MantissaError, match=r"quantises no layer|leaves no layer"):
        mantissa.adopt(make("gpt2"), "fp8", length=128)
