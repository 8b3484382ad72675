"""Ten thousand hostile inputs to whatever reads a foreign file, measured each: ``make test-inputs``.

    PYTHONPATH=tests/support:tests/fuzz python tests/fuzz/inputs.py [--seed N] [--count N] [--record] [READER ...]

The generators are the suite's (``test_readers.py``), and those below of what is read by no single reader: chat
templates, scripts and configurations, GGUF files: of each as many. An input may be refused or accepted; it fails where
it takes over 20 s of the processor or 2 GB of memory, in this process and in the one that reads apart, raises anything
but one clear error, or ends the process. A line a reader; exit code 1 where one failed, which is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import flips
from test_readers import GENERATORS, damaged

from gguf_files import gguf_decoder, write_gguf
from hostile import attempt
from mantissa.base.bounds import spending
from mantissa.base.readers import child, readers
from mantissa.launch.settings import read_settings
from mantissa.model import byte_tokenizer, load_model

MOST_S, MOST_BYTES = 20.0, 2 << 30
_SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
_SIZES = ("1", "7", "60", "10 ** 5", "999999", "9999999999", "messages[0].content | length")
_FILTERS = ("upper", "tojson(indent={n})", "center({n})", "indent({n})", "list", "batch({n})", "wordwrap({n})",
            "replace('a', 'a' * {n})", "join('x')", "format({n})", "truncate({n})", "urlencode", "nope")  # fmt: skip


def _expression(random: Random, levels: int = 2) -> str:
    """An expression of a template, of which parts may ask for any amount."""
    size = random.choice(_SIZES)
    inner = (lambda: _expression(random, levels - 1)) if levels else (lambda: random.choice(["'a'", "messages", size]))
    return random.choice([
        f"('a' * {size})", f"({inner()} ~ {inner()})", f"('%{random.choice(['9', '0999999999'])}d' % {size})",
        f"({inner()} | {random.choice(_FILTERS).format(n=size)})", f"'a'.{random.choice(['center', 'ljust', 'zfill'])}"
        f"({size})", f"range({size})", f"({inner()} + {inner()})", f"({inner()} * {size})", "messages[0].content",
        f"'{{:>{random.choice(['9', '999999999'])}}}'.format({size})", f"'a\\t'.expandtabs({size})",
    ])  # fmt: skip


def chat_template(random: Random, path: Path) -> None:
    body = f"{{{{ {_expression(random)} }}}}"
    for _ in range(random.randrange(4)):
        body = random.choice([
            f"{{% for i in range({random.choice(_SIZES[:5])}) %}}{body}{{% endfor %}}", f"{{% if messages %}}{body}",
            f"{{% set x = {_expression(random)} %}}{body}{{{{ x }}}}",
            f"{{% macro f() %}}{body}{{% endmacro %}}{{{{ f() }}}}",
            "{% set n = namespace(a='a') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}" + body,
        ])  # fmt: skip
    path.write_bytes(damaged(random, body.encode()))


@cache
def _tokenizer() -> Any:
    return byte_tokenizer()


def render(path: Path) -> Any:
    """What a prompt becomes by the template in a file."""
    _tokenizer().backend.chat_template = path.read_text(errors="replace")
    return _tokenizer().encode_prompt([{"role": "user", "content": "hello"}])


def script(random: Random, path: Path) -> None:
    """A folder of scripts or configurations that name one another, and variables that hold variables."""
    path.mkdir()
    kind, many, wide = random.choice(["sh", "py", "yaml"]), random.choice([2, 9, 41]), random.choice([1, 2, 40])
    long = random.choice([1, 1000, 99_000])
    for i in range(min(many, 9)):
        named = f"f{random.choice([i, i + 1, 0])}.{kind}"
        made = {
            "sh": f"V=${{V:-{'x' * long}}}$V$V\n" * wide + f"bash {named}\n" * wide + "run --a.b=1 " + "$V " * wide,
            "py": "a0 = " + random.choice(["[1]", "{'x': 1}", "'x'"]) + "\n" + "\n".join(
                f"a{n + 1} = " + random.choice(["[a{0}, a{0}]", "{{'l': a{0}, 'r': a{0}}}", "a{0}"]).format(n)
                for n in range(many)) + f"\nGRPOConfig(bf16=True, top_p=a{many}, x='{'x' * long}')\n",
            "yaml": f"defaults: [{', '.join([named] * wide)}]\na: 1\nb: {'x' * min(long, 1000)}\n",
        }[kind]  # fmt: skip
        (path / f"f{i}.{kind}").write_bytes(damaged(random, made.encode()))


def settings(path: Path) -> Any:
    """What ``mantissa check`` reads of a folder's first file."""
    return read_settings([str(min(path.iterdir()))])


@cache
def _gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "a.gguf", gguf_decoder("llama", **_SMALL)).read_bytes()


def gguf_file(random: Random, path: Path) -> None:
    data = bytearray(_gguf())
    for _ in range(random.randrange(1, 4)):
        data[random.randrange(min(len(data), random.choice([100, 4000, 10**9])))] ^= 1 << random.randrange(8)
    path.with_suffix(".gguf").write_bytes(damaged(random, bytes(data)))


Reader = Callable[[Path], Any]
OTHERS: dict[str, tuple[Callable[[Random, Path], None], Reader]] = {
    "chat templates": (chat_template, render),
    "scripts": (script, settings),
    "gguf": (gguf_file, lambda path: load_model(path.with_suffix(".gguf"))),
    "runs with a flipped bit": (flips.run_with_a_flipped_bit, flips.go_on),
    "models with a flipped bit": (flips.model_with_a_flipped_bit, flips.load),
}


def all_inputs() -> dict[str, tuple[Callable[[Random, Path], None], Reader]]:
    """Generator and reader by the name of what is read."""
    known = readers()
    return {name: (generator, known[name]) for name, generator in GENERATORS.items()} | OTHERS


def try_one(generate: Callable[[Random, Path], None], read: Reader, seed: str, path: Path) -> tuple[bool, float, int]:
    """Whether the input of a seed was refused, seconds of the processor, and bytes of memory that it took at most: here
    beyond what there was, and all of a process that reads apart."""
    generate(Random(seed), path)
    Path("/proc/self/clear_refs").write_text("5")
    before, began, others = peak(), _seconds(), _ended()
    with spending():
        refused = attempt(read, path) is not None
    return refused, _seconds() - began, max(peak() - before, _apart(others))


def peak(process: int | str = "self") -> int:
    """Bytes of memory that a process held at most; of this one since it was last reset."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next((int(each.split()[1]) for each in lines if each.startswith("VmHWM")), 0)


def _readers_apart() -> list[int]:
    found = []
    for each in child._idle.get(os.getpid(), []):
        each._listen(0.0)
        found += [each.process.pid, each.pid]
    return [pid for pid in found if Path(f"/proc/{pid}").exists()]  # they end where nobody asks them for long


def _ended() -> int:
    """Bytes that the largest child which has ended held, whosever it was."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def _apart(others: int) -> int:
    """Bytes that any process that reads apart has held at most, and in which many an input was read; of one that ended,
    where it held more than ``others``, children of other tests, did."""
    ended = _ended()
    return max([ended if ended > others else 0, *map(peak, _readers_apart())])


def _seconds() -> float:
    """Of the processor, of this process and those that read apart, ended or not, and those that they forked."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for pid in _readers_apart():
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return time.process_time() + ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def over(name: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """``count`` inputs of a reader: how many were refused, the longest, the largest, and the seeds of those that
    failed."""
    generate, read = all_inputs()[name]
    refused, longest, largest, failed = 0, 0.0, 0, list[str]()
    for number in range(count):
        path = folder / f"{number}"
        try:
            one, took, held = try_one(generate, read, f"{seed}/{name}/{number}", path)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(f"{number}: {type(error).__name__}: {str(error)[:100]}")
        else:
            refused, longest, largest = refused + one, max(longest, took), max(largest, held)
            if took > MOST_S or held > MOST_BYTES:
                failed.append(f"{number}: {took:.1f} s, {held >> 20:,} MiB")
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return {"reader": name, "inputs": count, "refused": refused, "longest_s": round(longest, 2),
            "largest_mib": largest >> 20, "failed": failed}  # fmt: skip


def main() -> int:
    """Try them; exit code 1 where one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="of all readers together, of each as many")
    parser.add_argument("--record", action="store_true", help="append a row to results/hostile_inputs.jsonl")
    parser.add_argument("readers", nargs="*")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # libraries' own, about what they read
    rows = []
    names = given.readers or [*all_inputs()]
    for name in names:
        with tempfile.TemporaryDirectory(prefix="inputs-") as folder:
            rows.append(over(name, -(-given.count // len(names)), given.seed, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    total, failed = sum(row["inputs"] for row in rows), [each for row in rows for each in row["failed"]]
    print(f"seed {given.seed}: {total:,} inputs, {len(failed)} failed, {time.process_time():.0f} s of the processor")
    if given.record:
        from rows import append

        about = {"benchmark": "hostile_inputs", "seed": given.seed, "inputs": total, "failed": len(failed)}
        append("hostile_inputs.jsonl", [about | {"processor_s": round(time.process_time()), "readers": rows}], "cpu")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
