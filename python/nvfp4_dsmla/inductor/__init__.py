"""A pass for torch.compile that fuses norm, rotation and write where it finds them in turn.

`enable_fusion()` once, before anything is compiled. From then on a write whose latent comes from an
RMSNorm and whose key comes from a rotation (RoPE) becomes one
`fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla`, in code that stays as it is. The page
docs/fusion.md says what is recognised and what is promised.

The logger `nvfp4_dsmla.inductor` tells, at level DEBUG, why a write was not fused: the first
condition that did not hold.
"""

from __future__ import annotations

from nvfp4_dsmla.inductor.fusion import (
    FusionPass,
    disable_fusion,
    enable_fusion,
    fusion_counts,
)
from nvfp4_dsmla.inductor.rewrite import Counts

__all__ = ["Counts", "FusionPass", "disable_fusion", "enable_fusion", "fusion_counts"]
