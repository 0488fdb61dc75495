"""What to tell torch.compile about a step's tensors, so that one compilation serves all steps.

Both calls mark tensors, and only the marks at the call that compiles count: the warm-up. Later
steps need none. A module's buffers need none at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["mark_static_pools", "mark_varying_sizes"]


def mark_static_pools(*pools: Tensor) -> None:
    """Says that these tensors stay where they are, and as large as they are.

    A pool that is an argument of a compiled function and written in it needs this under
    `mode="reduce-overhead"`: PyTorch makes no CUDA graph that writes to an argument, unless its
    address is known to be fixed. Under `dynamic=True` it keeps the pool's sizes out of the code.
    Another pool at the same place of a call works too, but compiles or captures anew.

    Args:
        pools: caches of any format, one layer's or a pool of layers, any other tensor that is
            written in place.
    """
    for pool in pools:
        torch._dynamo.mark_static(pool)
        torch._dynamo.mark_static_address(pool)


def mark_varying_sizes(**sizes: Sequence[tuple[Tensor, int]]) -> None:
    """Says which sizes differ from step to step: those are compiled as unknown.

    What this cannot make one: torch.compile compiles apart for the sizes 0 and 1, and takes sizes
    that are equal in the warm-up for one size ever after. So both are refused here. A batch is
    padded to 2 requests or more with slots of -1 and lengths of 0.

    Args:
        sizes: by a name of one's own, the dimensions that have one size, counted from either end:
            `batch=[(tokens, 0), (block_table, 0)], max_blocks=[(block_table, 1)]`.

    Raises:
        ValueError: the dimensions of a name differ in size, a size is below 2, or two names have
            the same size.
    """
    seen: dict[int, str] = {}
    for name, places in sizes.items():
        found = sorted({tensor.shape[dim] for tensor, dim in places})
        if len(found) != 1:
            raise ValueError(f"{name}: wanted dimensions of one size, got {found}")
        (size,) = found
        if size < 2:
            raise ValueError(
                f"{name}: wanted a size of at least 2 in the warm-up, since torch.compile compiles "
                f"apart for 0 and 1, got {size}"
            )
        if size in seen:
            raise ValueError(
                f"{name}: wanted a size in the warm-up that {seen[size]} does not have, since "
                f"torch.compile takes equal sizes for one, got {size}"
            )
        seen[size] = name
    for places in sizes.values():
        for tensor, dim in places:
            # A negative number is a mark that PyTorch never looks at (2.10 .. 2.14).
            torch._dynamo.mark_dynamic(tensor, dim % tensor.dim())
