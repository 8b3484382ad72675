"""Any causal language model of transformers under Mantissa's kernels: ``adopt``."""

from mantissa.adopted.adopt import Adopted, adopt

__all__ = ["Adopted", "adopt"]
