"""Every reader of a format against documents of that format, changed where its structure is: one error each, soon."""

from __future__ import annotations

import io
import json
import pickle
import pkgutil
import resource
import sqlite3
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from safetensors.torch import save
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

import mantissa.base.readers
from curve_logs import record
from hostile import attempt, sizes
from mantissa.base.readers import readers
from mantissa.model import byte_tokenizer

Generator = Callable[[Random, Path], None]  # writes one file, or a folder, to the path
_MOST_GROWTH = 1 << 30  # bytes by which all inputs of a reader may raise what the process held at most

PLAIN: list[Any] = [0, -1, 2**31, 2**63, 2**64, 10**308, 10**400, 1.5, 1e308, float("nan"), float("inf"), None, True,
                    "", "a", "é\u2028\0", "\ud800", "x" * 5000, [], {}, "NaN", "__class__"]  # fmt: skip


def tree(random: Random, levels: int = 4) -> Any:
    """Plain values in lists and dictionaries, now and then very deep."""
    if random.random() < 0.03:
        value: Any = 1
        for _ in range(random.choice([50, 99, 101, 150])):
            value = [value] if random.random() < 0.5 else {"a": value}
        return value
    if levels == 0 or random.random() < 0.3:
        return random.choice(PLAIN)
    inner = [tree(random, levels - 1) for _ in range(random.randrange(4))]
    return inner if random.random() < 0.5 else {random.choice(["a", "b", "tokens", "é"]): each for each in inner}


def damaged(random: Random, data: bytes) -> bytes:
    """Half of the times as it was; else cut off, doubled, or with some bytes overwritten, moved or taken out."""
    kind = random.randrange(10)
    at, to = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data + data
    if kind == 2:
        return data[:at] + data[min(len(data), at + random.randrange(1, 9)) :]
    if kind == 3:
        return data[:at] + data[at:to] + data[at:to] + data[to:]
    if kind == 4:
        some = bytearray(data)
        for _ in range(random.randrange(1, 5)):
            if some:
                some[random.randrange(len(some))] = random.choice([0, 1, 127, 128, 255, random.randrange(256)])
        return bytes(some)
    return data


def json_text(random: Random) -> bytes:
    deep, long = random.choice([10, 101, 5000, 10**5]), random.choice([10, 309, 5000, 10**5])
    made = random.choice(
        [
            "[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep, "9" * long, "-" + "9" * long, f"[1e{long}]",
            f'"{"9" * long}"', '{"a": 1, "a": [2], "a": {"a": 3}}', r'"\ud800"', r'{"\udfff": "\ud83d\ude00"}',
            "[" + "[]," * 10**5 + "1]", "[" + "{}," * random.choice([10**3, 6 * 10**6]) + "1]",
            "[" + "1," * 10**5, "NaN", "-Infinity", "\ufeff1", "", "[1,]", "nul",
            "{" + ",".join(f'"{n}": {n}' for n in range(10**4)) + "}",
            *[json.dumps(tree(random), ensure_ascii=random.random() < 0.7) for _ in range(15)],
        ]
    )  # fmt: skip
    return damaged(random, made.encode(random.choice(["utf-8"] * 9 + ["utf-16"]), "surrogatepass"))


def json_document(random: Random, path: Path) -> None:
    path.write_bytes(json_text(random))


def json_lines(random: Random, path: Path) -> None:
    path.write_bytes(b"\n".join(json_text(random) for _ in range(random.randrange(4))))


def yaml_document(random: Random, path: Path) -> None:
    count, kind = random.choice([3, 20, 60, 300]), random.randrange(6)
    name = random.choice(["[*a{0}, *a{0}]", "{{<<: [*a{0}, *a{0}]}}", "{{x: *a{0}, y: *a{0}}}", "{{? *a{0} : 1}}"])
    made = {
        0: "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {name.format(n - 1)}\n" for n in range(1, count)),
        1: random.choice(["- ", "[", "{a: ", "? ", "a: &a "]) * count * 5,
        2: "a: &a [" + "x, " * count + "*a]\n<<: *a\n",
        3: f"a: {random.choice(['!!int', '!!binary', '!!python/name:os.system', '!!timestamp', '!!set', '!x'])} "
        + random.choice(["x", "0x" + "f" * count, "9" * count, "[1]", "{1: 2}", "2001-99-99", "1:" * count]),
    }.get(kind) or yaml.dump(tree(random), default_flow_style=random.random() < 0.5, allow_unicode=True)
    path.write_bytes(damaged(random, made.encode("utf-8", "surrogatepass")))


def toml_document(random: Random, path: Path) -> None:
    count, kind = random.choice([3, 20, 300, 9_000]), random.randrange(6)
    made = ("a = " + "[" * count, "a." * count + "b = 1", "[a" + ".a" * count + "]", "a = " + "9" * count,
            "".join(f"[[a{n % 7}]]\nx = {{y.z = {n}}}\n" for n in range(min(count, 3_000))),
            f"x = {random.choice(['nan', '1979-05-27T07:32:00Z', '1e999', '[1, [{a.b = 3}]]'])}\n")[kind]  # fmt: skip
    path.write_bytes(damaged(random, made.encode()))


def pickled(random: Random) -> bytes:
    """A pickle of plain values, arrays or operations that few bytes ask much with."""
    op = pickle
    head, call = (
        b"\x80\x04",
        random.choice(
            [
                b"cos\nsystem\n",
                b"cbuiltins\neval\n",
                b"ctorch\nFloatStorage\n",
                b"ctorch._utils\n_rebuild_tensor_v2\n",
                b"cnumpy\nndarray\n",
                b"cnumpy\ndtype\n",
                b"ccollections\nOrderedDict\n",
            ]
        ),
    )
    doubled = b"]" + b"".join(op.MEMOIZE + op.MARK + op.BINGET + bytes([n]) * 1 + op.BINGET + bytes([n]) + b"l"
                              for n in range(40))  # fmt: skip
    made = [
        head + doubled + b".", head + b"]" * 5000 + b"a" * 4999 + b".", head + b"N" + op.LONG_BINPUT + b"\xff" * 4 + b".",  # noqa: E501
        head + op.BINBYTES8 + struct.pack("<Q", 2**62) + b"x.", head + op.LONG4 + struct.pack("<i", 2**30) + b".",
        head + call + b"(tR.", head + call + b"(K\x01K\x02tR}b.", head + call + b"}b.", head + b"]\x94h\x00a.",
        head + b"(" * 10**5 + b"t" * 10**5 + b".", b"\x80\x04\x82\x01.", b"\x80\x04P1\n.", b"",
    ]  # fmt: skip
    array = np.zeros(random.choice([(0,), (3,), (2, 2)]), random.choice(["f4", ">i8", "b1", "c8"]))
    objects = np.array([1, "a", None], object)
    made += [pickle.dumps(each, random.randrange(5)) for each in (array, objects, tree(random), {"a": {1, 2}}, 1 << 90)]
    return damaged(random, random.choice(made))


def zipped(random: Random) -> bytes:
    """What torch.save writes, with entries changed, added, compressed, twice or overlapping."""
    file, inner = io.BytesIO(), io.BytesIO()
    shape = random.choice([(0,), (3,), (2, 3), ()])
    content = {"a": torch.zeros(shape, dtype=random.choice([torch.float32, torch.bfloat16, torch.int8])), "n": [1, "x"]}
    torch.save(
        content | ({"a": torch.zeros(1).expand(random.choice([4, 10**6, 10**9]))} if random.random() < 0.2 else {}),
        inner,
    )
    if random.random() < 0.2:
        return damaged(random, inner.getvalue())
    with zipfile.ZipFile(inner) as source, zipfile.ZipFile(file, "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if random.random() < 0.2:
                data = pickled(random) if entry.filename.endswith(".pkl") else damaged(random, data)
            target.writestr(entry.filename, data, random.choice([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED]))
        if random.random() < 0.2:
            target.writestr("archive/data/inner.zip", inner.getvalue())
        if random.random() < 0.1:
            target.writestr("bomb", b"\0" * 10**7, zipfile.ZIP_DEFLATED)
    return damaged(random, file.getvalue())


def pickle_file(random: Random, path: Path) -> None:
    path.write_bytes(pickled(random) if random.random() < 0.5 else zipped(random))


def zip_file(random: Random, path: Path) -> None:
    path.write_bytes(zipped(random))


def safetensors_file(random: Random, path: Path) -> None:
    data = save({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, {"k": "v"})
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name, field = random.choice(["a", "b", "c", "__metadata__"]), random.choice(["dtype", "shape", "data_offsets", "x"])
    shape = [
        random.choice([-1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1.5, "1", None]) for _ in range(random.randrange(4))
    ]
    value = random.choice(["F32", "F64", "F4", "BOOL", 7, shape, [0, 8], [8, 0], [0, 2**63], [[]], tree(random)])
    if random.random() < 0.7:
        header[name] = {**header.get(name, {}), field: value} if random.random() < 0.8 else value
    text = json.dumps(header).encode()
    if random.random() < 0.1:
        text = random.choice(
            [b"[" * 10**5, b'{"a":' * 5000, text + text, b"{" + b'"a":1,' * 9000 + b'"a":1}', b"null", b""]
        )
    size = len(text) if random.random() < 0.8 else random.choice([0, 1, 10**8, 2**62, 2**64 - 1])
    path.write_bytes(damaged(random, size.to_bytes(8, "little") + text + body))


def parquet_file(random: Random, path: Path) -> None:
    count, wide = random.choice([0, 3, 300, 2000]), random.choice([1, 10, 1000])
    columns: dict[str, Any] = {
        "tokens": [[1] * random.randrange(wide)] * count,
        "text": ["x" * random.choice([1, 50, 2000])] * count,
        "number": [random.choice([None, 1.5, float("nan")])] * count,
        "struct": [{"a": [{"b": 1}], "c": None}] * count,
        "nothing": pyarrow.nulls(count),
    }
    if random.random() < 0.2:  # one long text in many rows, and lists of it: a few bytes that stand for gigabytes
        text = pyarrow.array(["x" * random.choice([10, 10**5, 10**7])])
        many = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4 * count, pyarrow.int32()), text)
        columns["text"] = many[:count]
        columns["tokens"] = pyarrow.ListArray.from_arrays(
            pyarrow.array(range(0, 4 * count + 1, 4), pyarrow.int32()), many
        )
    chosen = random.sample(sorted(columns), random.randrange(1, 4))
    buffer = io.BytesIO()
    table = pyarrow.table({name: columns[name] for name in chosen})
    pyarrow.parquet.write_table(table, buffer, compression=random.choice(["none", "snappy", "zstd", "gzip"]))
    path.write_bytes(damaged(random, buffer.getvalue()))


_SCHEMAS = [
    "CREATE TABLE t (a TEXT, b)", "CREATE TABLE \"a\"\"b\" (x)", "CREATE TABLE t (a, b AS (zeroblob(900000000)))",
    "CREATE VIEW t AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS a, x AS b FROM c",
    "CREATE TABLE t (a CHECK (a > 1), b UNIQUE)", "CREATE VIRTUAL TABLE v USING fts5(a)",
    "CREATE TABLE t (a, b); CREATE TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM t; END",
]  # fmt: skip


def sqlite_file(random: Random, path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(random.choice(_SCHEMAS))
    values = [None, 1, 2.5, "x" * random.choice([1, 10_000]), b"\0" * random.choice([1, 10_000]), "\0"]
    try:
        for _ in range(random.randrange(50)):
            connection.execute("INSERT INTO t (a) VALUES (?)", (random.choice(values),))
        connection.commit()
    except sqlite3.Error:
        connection.rollback()  # a view, or no such table
    connection.close()
    data = path.read_bytes()
    if random.random() < 0.2:  # what the schema says of a table, as text that SQLite parses when it opens the file
        data = data.replace(b"CREATE TABLE t", random.choice([b"CREATE TABLE u", b"CREATE VIEW  t", b"SELECT 1 -- t "]))
    path.write_bytes(damaged(random, data))


def csv_table(random: Random, path: Path) -> None:
    names = [
        random.choice(["Step", "loss", "a - b", "", "x" * 300, "=1+1", "é"]) for _ in range(random.randrange(1, 6))
    ]
    rows = [",".join(random.choice(["1", "nan", '"', '"a,b"', "", "9" * 400, "\0"]) for _ in names) for _ in range(9)]
    path.write_bytes(damaged(random, "\n".join([",".join(names), *rows]).encode()))


def event_file(random: Random, path: Path) -> None:
    values = [Summary.Value(tag=random.choice(["a", "é", "x" * 2000]), simple_value=random.choice([0.0, 1e38, np.nan]))
              for _ in range(random.randrange(4))]  # fmt: skip
    events = [Event(step=random.choice([0, -1, 2**62]), summary=Summary(value=values)) for _ in range(5)]
    data = b"".join(record(damaged(random, each.SerializeToString())) for each in events)
    path.write_bytes(damaged(random, data))


def npz_file(random: Random, path: Path) -> None:
    kind = random.choice([np.float64, np.int8, np.float16, object])
    write = random.choice([np.savez, np.savez, np.savez_compressed])
    with path.open("wb") as file:
        write(file, a=np.zeros(random.choice([0, 3, (2, 5)]), dtype=kind), b=np.arange(4))
    path.write_bytes(damaged(random, path.read_bytes()))


_STEPS = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}, {"type": "Prepend", "prepend": "aaaa"},
    {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 50}, {"type": "ByteLevel"}, {"type": "NFKC"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "a"}, {"type": "Lowercase"}, {"type": "Nope"}, 5, None,
    {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}, {"type": "Fuse"}, {"type": "Strip"},
]  # fmt: skip


def tokenizer_folder(random: Random, path: Path) -> None:
    byte_tokenizer().save(path)
    name = random.choice(["tokenizer.json"] * 4 + ["tokenizer_config.json"])
    document = json.loads((path / name).read_text())
    part, inner = random.choice(
        [("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")]
    )
    kind = random.randrange(6)
    if kind == 0:
        steps = [random.choice(_STEPS) for _ in range(random.choice([1, 3, 40]))]
        document[part] = {"type": "Sequence", inner: steps}
    elif kind == 1:
        for _ in range(random.choice([3, 90, 200])):
            document[part] = {"type": "Sequence", inner: [document.get(part)] * random.choice([1, 2])}
            if len(json.dumps(document)) > 10**6:
                break
    elif kind == 2:
        count = random.choice([10, 1000, 40_000, 100_000])
        document["added_tokens"] = [
            {
                "id": 258 + n,
                "content": f"<{n}>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": True,
                "special": False,
            }
            for n in range(count)
        ]
    elif kind == 3:
        document[random.choice(sorted(document))] = tree(random)
    elif kind == 4 and name == "tokenizer.json":
        document["model"]["vocab"]["x" * random.choice([10, 10**6])] = random.choice([258, -1, 2**40, "a", None])
    (path / name).write_bytes(damaged(random, json.dumps(document).encode()))


GENERATORS: dict[str, Generator] = {
    "json": json_document, "json rows": json_lines, "yaml": yaml_document, "pickles": pickle_file, "zips": zip_file,
    "pickles of objects": pickle_file, "toml": toml_document,
    "torch files": pickle_file, "safetensors": safetensors_file, "parquet": parquet_file, "sqlite": sqlite_file,
    "tokenizers": tokenizer_folder, "csv": csv_table, "events": event_file, "npz": npz_file,
}  # fmt: skip
SLOW = {"tokenizers": 5, "parquet": 2, "sqlite": 2}  # to write or to read: so many times fewer inputs


def test_every_reader_has_a_generator_and_every_module_a_reader() -> None:
    assert GENERATORS.keys() == readers().keys()
    # What readers share; and chat templates, which come within other files: ``inputs.py`` has them.
    others = {"limits", "child", "templates"}
    modules = {module.name for module in pkgutil.iter_modules(mantissa.base.readers.__path__)} - others
    assert modules == {name.split()[0] if name != "torch files" else "torch_files" for name in readers()}


def paths(folder: Path) -> Iterator[Path]:
    number = 0
    while True:
        yield folder / f"{number}"
        number += 1


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@sizes(25, 1000)
@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.filterwarnings("ignore")  # of libraries, about what they read
def test_any_document(name: str, count: int, tmp_path: Path) -> None:
    random, read, before, refused = Random(0), readers()[name], peak(), 0
    count = max(25, count // SLOW.get(name, 1))
    for _, path in zip(range(count), paths(tmp_path), strict=False):
        GENERATORS[name](random, path)
        refused += attempt(read, path) is not None
        if path.is_file():
            path.unlink()
    assert peak() - before < _MOST_GROWTH
    assert 0 < refused < count, f"{refused} of {count} refused: the generator makes only one kind"
    print(f"{name}: {count} inputs, {refused} refused")
