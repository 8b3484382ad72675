"""A tensor's digest: the same however it is cut, another for any other bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.base.tensors import Digest, digest, partial

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.uint8]


def matrix(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (12, 40)) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 20).abs().to(dtype)


def by_definition(x: Tensor) -> int:
    """The sum of the module's text, a value at a time, of a matrix of 16 bits."""

    def factor(index: int, seed: int) -> int:
        z = (index + 1 + (seed << 40)) * 0x9E3779B97F4A7C15 % (1 << 64)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
        return (z ^ (z >> 31)) | 1

    rows = x.view(torch.int16).tolist()
    return sum(factor(i, 1) * factor(j, 2) * value for i, row in enumerate(rows) for j, value in enumerate(row)) % (
        1 << 64
    )


def test_it_is_the_sum_that_it_says() -> None:
    x = matrix(torch.bfloat16, (3, 5)) * torch.tensor([1, -1, 1, -1, 1])
    assert partial(x) == by_definition(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_add_to_the_whole_and_layout_is_nothing(dtype: torch.dtype) -> None:
    x = matrix(dtype)
    whole = digest(x)
    assert Digest.parse(str(whole)) == whole
    assert whole.weights == 480
    assert digest(x.T.contiguous().T) == whole
    rows = sum(partial(x[start : start + 5], row=start) for start in (0, 5, 10))
    columns = sum(partial(x[:, start : start + 16], column=start) for start in (0, 16, 32))
    assert rows % (1 << 64) == columns % (1 << 64) == whole.total
    assert digest(x.reshape(12, 4, 10)).total == whole.total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_other_bits_have_another(dtype: torch.dtype) -> None:
    x = matrix(dtype)
    bits = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    others = [each.view(dtype) for each in (bits.flip(0), bits.flip(1), bits.roll(1, 0))]
    others += [torch.zeros_like(x), x[:, :39], x.T]
    for row, column in ((0, 0), (11, 39), (5, 7)):
        other = bits.clone()
        other[row, column] ^= 1
        others.append(other.view(dtype))
    if dtype.is_floating_point:
        others.append((-x.float()).to(dtype))
    found = [digest(each).total for each in (x, *others)]
    assert len(set(found)) == len(found)
    assert digest(torch.zeros_like(x)).total == 0


def test_zero_has_no_sign_and_what_is_no_tensor_of_numbers_is_refused() -> None:
    assert digest(torch.tensor([0.0, -0.0, 1.0])) == digest(torch.tensor([-0.0, 0.0, 1.0]))
    assert digest(torch.tensor(3.0)).shape == ()
    assert digest(torch.empty(0, 4)).total == 0
    for wrong in ("bfloat16", "bfloat16 (3, x) 0123456789abcdef", "another layout"):
        with pytest.raises(MantissaError, match="expected a tensor's dtype, shape and digest"):
            Digest.parse(wrong)
    with pytest.raises(MantissaError, match="expected real numbers"):
        digest(torch.zeros(2, dtype=torch.complex64))
