"""The system-call filter, held against the kernel's headers, and each layer of the sandbox by itself."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from mantissa.tasks.sandbox.jail import CHECKED, SYSCALLS, filter_program

ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000
HEADERS = {  # column of the table: where the kernel's numbers stand, and how they are written
    0: (("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"), r"__NR_(\w+)\s+(\d+)"),
    1: (("/usr/include/asm-generic/unistd.h",), r"__NR(?:3264)?_(\w+)\s+(\d+)"),
}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.mark.parametrize("column", HEADERS)
def test_numbers_are_the_kernels(column: int) -> None:
    paths, pattern = HEADERS[column]
    path = next((Path(p) for p in paths if Path(p).is_file()), None)
    if path is None:
        pytest.skip("needs the kernel's headers")
    kernel = {name: int(number) for name, number in re.findall(r"#define\s+" + pattern, path.read_text())}
    kernel.setdefault("newfstatat", kernel.get("fstatat", -1))  # the generic header's name for the same call
    for name, numbers in {**SYSCALLS, **CHECKED}.items():
        assert numbers[column] == kernel.get(name, -1), name


def simulate(code: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Run the filter as the kernel does: a slow interpreter of the four instructions that it uses."""
    arguments = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<iIQ6Q", number, architecture, 0, *arguments)
    at, accumulator = 0, 0
    while True:
        operation, yes, no, k = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == 0x06:
            return int(k)
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k}[operation]
            at += yes if holds else no


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_allows_what_is_listed_and_nothing_else(machine: str, column: int) -> None:
    code = filter_program(machine)
    assert code is not None
    listed = {numbers[column] for numbers in SYSCALLS.values()} - {-1}
    (fcntl,) = (numbers[column] for numbers in CHECKED.values())
    for number in range(600):
        want = ALLOW if number in listed or number == fcntl else DENY  # with command 0: F_DUPFD
        assert simulate(code, AUDIT[machine], number) == want, number
    for command in range(2000):  # F_SETOWN, F_SETSIG, F_SETFL, F_NOTIFY, F_SETPIPE_SZ and all that is yet to come
        want = ALLOW if command in (0, 1, 2, 3, 1030) else DENY
        assert simulate(code, AUDIT[machine], fcntl, (3, command)) == want, command
        assert simulate(code, AUDIT[machine], fcntl, (3, command | 1 << 32)) == want  # the kernel reads 32 bits of it
    other = AUDIT["aarch64" if machine == "x86_64" else "x86_64"]
    assert simulate(code, other, 0) == KILL
    assert simulate(code, AUDIT[machine], 0x40000000) == DENY


def test_no_filter_for_an_architecture_without_a_table() -> None:
    assert filter_program("riscv64") is None
