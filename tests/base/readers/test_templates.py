"""Chat templates as transformers renders them, to the letter, in a process that a hostile one may have for itself."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hostile import attempt
from mantissa.base.errors import MantissaError
from mantissa.base.readers import child
from mantissa.base.readers.templates import render
from mantissa.model import byte_tokenizer

PLAIN = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "<b>é\u2028&'\"</b> "},
         {"role": "assistant", "content": " 4 "}]  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": None, "thinking": "hm", "n": [1, 2.5, True, None], "é": {"b": 1, "a": []}},
    {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": {"q": "é<"}}]},
]
# Chat templates as models have them, of the kinds that there are: ChatML, Llama's, Mistral's, Gemma's, of a reasoner.
TEMPLATES = [
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{- bos_token }}\n{%- for m in messages %}\n    {{- '<|' + m.role + '|>\n\n' + m['content'] | trim }}\n"
    "  {%- if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}\n{% endfor %}\n",
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% for m in messages if m.role "
    "!= 'system' %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{% generation %}{{ m.content }}"
    "{% set x = 3 %}{{ eos_token }}\n{% endgeneration %}{{ x }}{% endif %}{% endfor %}\n\n  {# a note #}\n"
    "{{ tools }}{{ documents }}",
    "{% set ns = namespace(found=false, text='') %}{% for m in messages %}{% if loop.index0 > 1 %}{% break %}"
    "{% endif %}{% set ns.text = ns.text ~ m | tojson %}{% endfor %}{{ ns.text }}{{ messages | tojson(indent=2) }}",
    "{% macro f(v, level=0) %}{{ level }}{{ v | string | upper }}{% endmacro %}{% for m in messages %}\n  "
    "{% if m.content is string %}\n{{ f(m.content, loop.index) }}\n  {% endif %}\n{{ m.keys() | list }}\n"
    "{% endfor %}{{ strftime_now('%Y') }}",
    "{{ dict(a=1) | tojson }}{{ messages[-1].get('reasoning_content', '-') }}"
    "{{ messages | map(attribute='role') | join(',') }}",
]  # fmt: skip


@pytest.fixture
def backend() -> Any:
    return byte_tokenizer().backend


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", [PLAIN, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_what_transformers_renders(
    template: str, messages: list[dict[str, Any]], prompt: bool, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.chat_template = template
    backend.add_special_tokens({"bos_token": "<bos>"})
    try:
        expected = backend.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    except Exception as error:  # noqa: BLE001 - Jinja's own, of many kinds
        kind = type(error).__name__
        assert kind in str(attempt(render, backend, messages, prompt))
        return
    assert render(backend, messages, prompt) == expected
    monkeypatch.setattr(child, "inside", True)
    assert render(backend, messages, prompt) == expected


def test_some_of_the_templates_are_rendered_and_some_refuse(backend: Any) -> None:
    """Or the comparison above would be of nothing."""
    backend.chat_template = TEMPLATES[2]
    assert render(backend, PLAIN, True).startswith("[INST] <b>é")
    backend.chat_template = TEMPLATES[0]
    assert "UndefinedError" in str(attempt(render, backend, TOOLS[:1], True))


def test_the_default_of_several_templates(backend: Any) -> None:
    backend.chat_template = {"default": "a{{ messages[0].role }}", "tool_use": "b"}
    assert render(backend, PLAIN, False) == "asystem"
    backend.chat_template = {"other": "a"}
    assert "other" in str(attempt(render, backend, PLAIN, False))


HOSTILE = {
    "{{ 9 ** 99999999 }}": "took longer than 2 s",
    "{{ '%0999999999d' % 1 }}": "used more than 512 MiB",
    "{{ 'a' * 9999999999 }}": "used more than 512 MiB",
    "{{ messages[0].role * 20000000 }}": "a prompt of 120,000,000 characters",
    "{{ '\\ud800' }}": "no JSON",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
}


@pytest.mark.parametrize("template", HOSTILE)
@pytest.mark.parametrize("main", [True, False])
def test_a_hostile_template_is_one_error_in_any_thread(template: str, main: bool, backend: Any) -> None:
    backend.chat_template = template
    said: list[MantissaError | None] = []
    before = _peak(os.getpid())
    if main:
        said.append(attempt(render, backend, PLAIN, True))
    else:
        thread = threading.Thread(target=lambda: said.append(_error(lambda: render(backend, PLAIN, True))))
        thread.start()
        thread.join()
    assert HOSTILE[template] in str(said[0])
    assert _peak(os.getpid()) - before < 64 << 20, "nothing of it was made in this process"
    backend.chat_template = "{{ messages[0].content }}"
    assert render(backend, PLAIN, True) == "Be brief.\n"


def _error(function: Any) -> MantissaError | None:
    try:
        function()
    except MantissaError as error:
        return error
    return None


def _peak(pid: int) -> int:
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _idle() -> child.Child:
    (one,) = (each for each in child._idle[os.getpid()] if "jinja2.sandbox" in each.kind[1])
    one._listen(0.0)
    return one


def test_a_template_that_is_rendered_often_has_one_process(backend: Any) -> None:
    backend.chat_template = "{{ messages[0].content }}"
    render(backend, PLAIN, True)
    one, pid = _idle(), _idle().pid
    began = time.process_time()
    for _ in range(200):
        render(backend, PLAIN, True)
    assert (_idle(), _idle().pid) == (one, pid)
    assert time.process_time() - began < 2.0, "a fraction of a millisecond each"


def test_each_template_is_rendered_where_no_other_was(backend: Any) -> None:
    """By a process that is forked from the one, in which nothing was rendered."""
    seen = set[int]()
    for text in "aba":
        backend.chat_template = text
        assert render(backend, PLAIN, True) == text
        assert not any(Path(f"/proc/{each}").exists() for each in seen)
        seen.add(_idle().pid)
    assert len(seen) == 3


def test_one_that_has_rested_long_is_not_asked_again(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.chat_template = "{{ messages[0].content }}"
    render(backend, PLAIN, True)
    one = _idle()
    monkeypatch.setattr(child, "_IDLE_S", 0.0)
    assert render(backend, PLAIN, True) == "Be brief.\n"
    assert _idle() is not one
    assert one.process.returncode is not None, "and it has ended"


def test_half_a_character_is_refused(backend: Any) -> None:
    backend.chat_template = "{{ messages[0].content }}"
    assert "surrogate" in str(attempt(render, backend, [{"role": "user", "content": "\ud800"}], True))
