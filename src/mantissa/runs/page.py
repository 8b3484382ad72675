"""The report's look: one style sheet, and small functions that turn values into escaped HTML.

The page loads nothing: no script, no font, no image from anywhere; its content policy forbids even trying.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from mantissa.runs.live import power_of_two
from mantissa.runs.plots import VARIABLES, Dash, Plot

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff\ud800-\udfff]")

_CSS = """
:root { color-scheme: light dark;
  --page:#f6f6f4; --card:#ffffff; --line:#e2e1dc; --grid:#e6e5e0; --ink:#1c1d1f; --muted:#63656b;
  --good:#15803d; --watch:#a05a00; --bad:#b91c1c; --good-bg:#e9f6ed; --watch-bg:#fdf3e0; --bad-bg:#fdecec;
  --c1:#2563c9; --c2:#c65a11; --c3:#15803d; --c4:#7e3fb8; --c5:#0e7f96; --c6:#c2256f; --c7:#8a6d3b; --c8:#9a9ca3;
  --r1:#2563c9; --r2:#fd6214; --r3:#51002c; --r4:#c28491; --r5:#454300; --r6:#1c2a73; --r7:#a287c0; --r8:#95374c; }
@media (prefers-color-scheme: dark) { :root {
  --page:#141517; --card:#1c1e21; --line:#303338; --grid:#2f3237; --ink:#e7e7e5; --muted:#9da1a8;
  --good:#6ccf8e; --watch:#f0b35a; --bad:#f58a8a; --good-bg:#16281d; --watch-bg:#2d2413; --bad-bg:#321b1c;
  --c1:#77a6f7; --c2:#f29a57; --c3:#6ccf8e; --c4:#c197f0; --c5:#5cc4da; --c6:#f087b5; --c7:#cdb07c; --c8:#7d8188;
  --r1:#77a6f7; --r2:#f84f1a; --r3:#fef0bd; --r4:#f4afd5; --r5:#a1f751; --r6:#7f51db; --r7:#a3626a; --r8:#d86e55; } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif }
main { max-width:1160px; margin:0 auto; padding:32px 24px 64px }
h1 { font-size:26px; line-height:1.25; margin:0; letter-spacing:-.01em; overflow-wrap:anywhere }
h2 { font-size:18px; margin:40px 0 12px; letter-spacing:-.005em }
h3 { font-size:15px; margin:0 0 2px; font-weight:600 }
p { margin:0 } .sub,.note { color:var(--muted) } .sub { margin:4px 0 20px } .note { font-size:13px }
.card { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:16px 18px; min-width:0 }
.verdict { border-left:5px solid var(--muted); margin-bottom:14px } .verdict h2 { margin:0; font-size:20px }
.verdict ul { margin:6px 0 0; padding-left:18px }
.healthy { background:var(--good-bg); border-left-color:var(--good) } .healthy h2 { color:var(--good) }
.watch { background:var(--watch-bg); border-left-color:var(--watch) } .watch h2 { color:var(--watch) }
.unhealthy { background:var(--bad-bg); border-left-color:var(--bad) } .unhealthy h2 { color:var(--bad) }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(230px,1fr)); gap:14px }
.figure { font-size:25px; font-weight:650; line-height:1.3; font-variant-numeric:tabular-nums; letter-spacing:-.01em }
.label { color:var(--muted); font-size:13px }
.plots { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr)); gap:14px }
figure { margin:0; display:flex; flex-direction:column } figure svg { width:100%; height:auto; margin-top:auto }
figure .said { margin:auto 0; padding:28px 0; text-align:center; color:var(--muted) }
svg text { font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif }
.legend { display:flex; flex-wrap:wrap; gap:2px 14px; margin:6px 0 4px; font-size:13px }
.legend span { white-space:nowrap }
.legend i { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:6px; vertical-align:-1px }
.wide { overflow-x:auto; padding:6px 0 }
table { border-collapse:collapse; width:100%; font-size:14px }
th { text-align:left; color:var(--muted); font-weight:500; font-size:13px }
th,td { padding:6px 10px; vertical-align:top; border-bottom:1px solid var(--line) }
th:first-child,td:first-child { padding-left:18px }
tr:last-child td { border-bottom:0 } td { min-width:150px }
th.n { white-space:nowrap } td.v { min-width:88px; overflow-wrap:anywhere; font-variant-numeric:tabular-nums }
.key { width:34px; height:10px; margin-right:7px; vertical-align:0 } th .key { display:block; margin:0 0 3px }
.gap { margin-top:14px } .one { max-width:640px } .below { margin-top:8px } td .note { font-size:12.5px }
td.n { min-width:0; font-variant-numeric:tabular-nums; white-space:nowrap }
code,pre { font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace }
pre { margin:0; white-space:pre-wrap; overflow-wrap:anywhere }
.pill { display:inline-block; border-radius:99px; padding:1px 10px; font-size:12.5px; font-weight:600 }
.pill.good { color:var(--good); background:var(--good-bg) } .pill.bad { color:var(--bad); background:var(--bad-bg) }
.pill.watch { color:var(--watch); background:var(--watch-bg) }
.samples { display:grid; gap:14px; grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr)) }
.meta { display:flex; flex-wrap:wrap; gap:4px 14px; align-items:baseline; margin-bottom:8px }
.prompt { color:var(--muted); border-left:3px solid var(--line); padding-left:10px; margin-bottom:8px }
details { margin-top:14px } summary { cursor:pointer; font-weight:600; font-size:16px } summary + * { margin-top:12px }
@media print { body { background:none } .card,figure { break-inside:avoid } }
"""


def text(value: object) -> str:
    """Any value as text safe inside an element or a quoted attribute; control characters become visible."""
    return html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value)))


def scale_text(value: float) -> str:
    """A loss scale: ``2¹⁶`` where it is a power of two, else the number."""
    base, power, exponent = power_of_two(value).partition("^")
    return base + exponent.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")) if power else base


def page(title: str, body: Iterable[str]) -> str:
    """The whole document around ``body``."""
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{text(title)}</title>",
            f"<style>{_CSS}</style></head><body><main>",
            *body,
            "</main></body></html>\n",
        )
    )


def card(label: str, figure: str, note: str) -> str:
    """One headline number: plain strings, escaped here."""
    return (
        f'<div class="card"><div class="label">{text(label)}</div>'
        f'<div class="figure">{text(figure)}</div><p class="note">{text(note)}</p></div>'
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str] | None = None) -> str:
    """A table; header and cells are HTML already. ``kinds``: each column's class, ``""`` prose, ``"n"`` kept on one
    line, ``"v"`` narrow and folded; without it prose columns go by their names."""
    kinds = kinds or ["" if name in ("reason", "formula", "source") else "n" for name in header]
    classes = [f' class="{kind}"' if kind else "" for kind in kinds]
    head = "".join(f"<th{kind}>{cell}</th>" for kind, cell in zip(classes, header, strict=True))
    lines = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(classes, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="card wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def plot(drawn: Plot) -> str:
    """A figure with its title, what it says, and its legend."""
    parts = [f'<figure class="card"><h3>{text(drawn.title)}</h3>']
    if not drawn.svg:
        return "".join((*parts, f'<p class="said">{text(drawn.note)}</p></figure>'))
    parts.append(f'<p class="note">{text(drawn.note)}</p>')
    if drawn.legend:
        dashes = drawn.dashes or (None,) * len(drawn.legend)
        entries = (
            f"<span>{key(colour, dash)}{text(label)}</span>"
            for (label, colour), dash in zip(drawn.legend, dashes, strict=True)
        )
        parts.append(f'<div class="legend">{"".join(entries)}</div>')
    return "".join((*parts, drawn.svg, "</figure>"))


def key(colour: str, dash: Dash | None) -> str:
    """A legend's sample of a series: a square of its colour, or with ``dash`` (empty: solid) a stroke of its line."""
    variable = VARIABLES[colour]
    if dash is None:
        return f'<i style="background:var({variable})"></i>'
    broken = f' stroke-dasharray="{" ".join(f"{2 * length:g}" for length in dash)}"' if dash else ""
    line = f'<line x1="0" y1="5" x2="34" y2="5" stroke="var({variable})" stroke-width="2.4"{broken}></line>'
    return f'<svg class="key" width="34" height="10" viewBox="0 0 34 10" aria-hidden="true">{line}</svg>'


def folded(title: str, content: str) -> str:
    """A section closed until clicked; ``content`` is HTML already."""
    return f"<details><summary>{text(title)}</summary>{content}</details>"


def pre(value: object) -> str:
    """Preformatted text in a card."""
    return f'<div class="card"><pre>{text(value)}</pre></div>'


def shortened(value: str, limit: int) -> str:
    """``value`` with its middle left out where it is longer than ``limit`` characters."""
    if len(value) <= limit:
        return value
    half = limit // 2
    return f"{value[:half]} [... {len(value) - 2 * half:,} characters left out ...] {value[-half:]}"
