"""How grouped-query attention fits the latent record of MLA.

An MLA cache stores one 576-wide row a token: 512 latent numbers (kv_c), which are key and value at
once, and 64 rotated ones (k_pe). A model with few KV heads stores its keys and values there:

    kv_c  | K0 | K1 | K2 | V0 | V1 | V2 | zeros        |    k_pe  | zeros |
          0              192            384          512          512     576

A query of the heads that share KV head g is placed at Kg and is zero elsewhere, so that its product
with a row is exactly q . Kg; the attention's 512-wide output holds the head's result at Vg. With
that, an ordinary model runs through the very ops an MLA model uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM


@dataclass(frozen=True)
class LatentLayout:
    """Where the K and V of each KV head lie in a row. Raises ValueError if they do not fit."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: wanted a multiple of the {self.num_kv_heads} KV heads, "
                f"got {self.num_heads}"
            )
        if 2 * self.kv_width > NOPE_DIM:
            raise ValueError(
                f"K and V of a token: wanted at most {NOPE_DIM} numbers, got {2 * self.kv_width}"
            )

    @property
    def kv_width(self) -> int:
        """How many numbers all keys of a token are (and all values)."""
        return self.num_kv_heads * self.head_dim

    def pack(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """kv [B, S, 2 * num_kv_heads, head_dim], keys first -> kv_c [B*S, 512], k_pe [B*S, 64].

        Both are slices of one tensor: the ops take rows of any stride.
        """
        rows = F.pad(kv.flatten(0, 1).flatten(1), (0, HEAD_DIM - 2 * self.kv_width))
        return rows[:, :NOPE_DIM], rows[:, NOPE_DIM:]

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [B, N, 576] -> k, v [B, N, num_kv_heads, head_dim], views."""
        width = self.kv_width
        shape = (*rows.shape[:-1], self.num_kv_heads, self.head_dim)
        return rows[..., :width].reshape(shape), rows[..., width : 2 * width].reshape(shape)

    def widen_query(self, q: torch.Tensor) -> torch.Tensor:
        """q [B, S, num_heads, head_dim] -> [B, S, num_heads, 576], each at its KV head's K."""
        batch, seq = q.shape[:2]
        # [B, S, g, heads of g, 1, d] * [g, 1, g', 1]: a copy at every KV head, zero but at its own.
        grouped = q.reshape(batch, seq, self.num_kv_heads, -1, 1, self.head_dim)
        placed = (grouped * self._own(q)).view(batch, seq, self.num_heads, self.kv_width)
        return F.pad(placed, (0, HEAD_DIM - self.kv_width))

    def head_output(self, out: torch.Tensor) -> torch.Tensor:
        """out [B, S, num_heads, 512] of attention over rows -> [B, S, num_heads, head_dim]."""
        batch, seq = out.shape[:2]
        values = out[..., self.kv_width : 2 * self.kv_width].reshape(
            batch, seq, self.num_kv_heads, -1, self.num_kv_heads, self.head_dim
        )
        return (values * self._own(out)).sum(-2).view(batch, seq, self.num_heads, self.head_dim)

    def _own(self, like: torch.Tensor) -> torch.Tensor:
        """[g, 1, g', 1]: one where g == g', a group of heads and its own KV head."""
        size = self.num_kv_heads
        return torch.eye(size, dtype=like.dtype, device=like.device).view(size, 1, size, 1)
