"""Any causal language model of transformers under Mantissa's kernels: ``adopt``."""

from mantissa.adopted.adopt import Adopted, Plans, adopt

__all__ = ["Adopted", "Plans", "adopt"]
