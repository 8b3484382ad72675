"""Number formats, rounding, the policy that assigns formats to roles, safe numerics."""

from mantissa.precision.blocks import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    SQUARE,
    BlockScaled,
    dequantize,
    quantize,
    round_cached,
    round_in_blocks,
)
from mantissa.precision.formats import (
    BF16,
    DIAL,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    NumberFormat,
    format_named,
    is_on_grid,
    round_by_arithmetic,
    round_stochastically,
    round_to_format,
    round_to_format_,
)
from mantissa.precision.policy import (
    PRESETS,
    Fp8Policy,
    PrecisionPolicy,
    Quantized,
)
from mantissa.precision.schemes import SCHEMES, Coded, Scheme, int8_codes

__all__ = [
    "ALONG_COLUMNS", "ALONG_ROWS", "BF16", "DIAL", "E4M3", "E5M2", "FORMATS", "FP16", "FP32", "PRESETS", "SCHEMES",
    "SQUARE", "BlockScaled", "Coded", "Fp8Policy", "NumberFormat", "PrecisionPolicy", "Quantized",
    "Scheme",
    "dequantize", "format_named", "int8_codes", "is_on_grid", "quantize", "round_by_arithmetic",
    "round_cached", "round_in_blocks", "round_stochastically", "round_to_format", "round_to_format_",
]  # fmt: skip
