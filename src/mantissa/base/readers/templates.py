"""The one place that renders a chat template: a program of a stranger's in Jinja, run in a process of its own.

One operation on texts may ask for any amount of memory (``'%0999999999d' % 1``) and nothing interrupts it; a power is
worked out when the template is compiled. There an address space and two seconds bound it (``child.py``),
whichever thread asks.

What is rendered is what transformers renders, to the letter: its environment (an immutable sandbox, blocks trimmed,
``generation`` blocks, loop controls) and its names, and messages as transformers prepares them.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mantissa.base.bounds import boundary, whole_text
from mantissa.base.errors import MantissaError
from mantissa.base.readers import child
from mantissa.base.readers.json import as_json, parse_json

# A millisecond and a few megabytes are usual.
LIMITS = child.Limits(wall_s=2.0, cpu_s=3, memory_bytes=512 << 20, output_bytes=64 << 20)
_LONGEST = 4_000_000  # characters: a million tokens
_WHERE, _ADVICE = "tokenizer: its chat template refuses these messages", "mend the template or the messages"
# As a template: what transformers shows one of the messages that it is given.
_SHOWN = "{{ messages | tojson }}"


def render(backend: Any, messages: Sequence[Mapping[str, Any]], generation_prompt: bool) -> str:
    """What the chat template of a transformers tokenizer makes of messages. ``MantissaError`` where it refuses them,
    asks for too much, or takes over two seconds."""
    with boundary(_WHERE, _ADVICE):
        template = backend.get_chat_template()
        shown = backend.apply_chat_template([dict(each) for each in messages], chat_template=_SHOWN, tokenize=False)
        if not whole_text(shown):
            raise MantissaError(f"{_WHERE}: they hold half of a surrogate pair; {_ADVICE}")
        names = as_json(backend.special_tokens_map)
        if child.inside:
            (text,) = rendered(template, shown, names, generation_prompt)
            return text
        with child.lent("jinja2.sandbox", __name__, source=template, limits=LIMITS) as process:
            process.ask(f"{__name__}:rendered", _WHERE, template, shown, names, generation_prompt)
            (text,) = [*process.parts()] or [None]
            if not isinstance(text, str):
                raise process.garbage("no text")
            return text


def rendered(template: str, shown: str, names: Mapping[str, Any], generation_prompt: bool) -> Iterator[str]:
    """In the process that renders: the text alone."""
    given: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": generation_prompt}
    with boundary(_WHERE, _ADVICE):
        text = _compiled(template).render(messages=parse_json(shown), **given | dict(names))
        if len(text) > _LONGEST:
            raise ValueError(f"a prompt of {len(text):,} characters")
        yield text


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``: what the assistant says, which is part of the text as it stands."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own way to name them

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_as_it_stands"), [], [], body).set_lineno(line)

        def _as_it_stands(self, caller: Any) -> str:
            return str(caller())

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(template)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: Any) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
