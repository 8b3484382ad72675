"""Number formats, rounding, the policy that assigns formats to roles, safe numerics."""

from mantissa.precision.formats import (
    BF16,
    DIAL,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    LOG_RATIO_BOUND,
    Accumulator,
    AccumulatorKind,
    KLEstimator,
    NumberFormat,
    clamped_log_ratio,
    entropy,
    format_named,
    is_on_grid,
    kl_estimate,
    masked_mean,
    masked_sum,
    merge,
    round_by_arithmetic,
    round_stochastically,
    round_to_format,
    round_to_format_,
    token_logprob,
    values,
)
from mantissa.precision.policy import (
    PRESETS,
    Fp8Policy,
    PrecisionPolicy,
    Quantized,
)
from mantissa.precision.schemes import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    SCHEMES,
    SQUARE,
    BlockScaled,
    Coded,
    Scheme,
    dequantize,
    int8_codes,
    quantize,
    round_cached,
    round_in_blocks,
)

__all__ = [
    "ALONG_COLUMNS", "ALONG_ROWS", "BF16", "DIAL", "E4M3", "E5M2", "FORMATS", "FP16", "FP32", "LOG_RATIO_BOUND",
    "PRESETS", "SCHEMES", "SQUARE", "Accumulator", "AccumulatorKind", "BlockScaled", "Coded", "Fp8Policy",
    "KLEstimator", "NumberFormat", "PrecisionPolicy", "Quantized", "Scheme", "clamped_log_ratio", "dequantize",
    "entropy", "format_named", "int8_codes", "is_on_grid", "kl_estimate", "masked_mean", "masked_sum", "merge",
    "quantize", "round_by_arithmetic", "round_cached", "round_in_blocks", "round_stochastically", "round_to_format",
    "round_to_format_", "token_logprob", "values",
]  # fmt: skip
