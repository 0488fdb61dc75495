"""The nvfp4 ops and the merge on small odd shapes, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=tests:. \
        compute-sanitizer --error-exitcode 1 python -m benchmarks.sanitizer_cases

Without PyTorch's caching each tensor is an allocation of its own that ends where the tensor ends,
so that memcheck sees a byte too far. All data comes from the host: no kernel runs but the ops'.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

import cases
import decode_cases
import fused_cases
import nvfp4_dsmla
from nvfp4_dsmla import reference, reference_fused
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES

if TYPE_CHECKING:
    from torch import Tensor

# Either side of where the kernels change their shape, and no multiples of what a block takes.
TOKENS = {
    torch.bfloat16: (1, 3, 33, 1031, 2053),
    torch.float16: (1, 33),
    torch.float32: (1, 33),
}
FUSED_TOKENS = (1, 33, 2053, 8197)


def main() -> None:
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    count = 0
    for dtype, sizes in TOKENS.items():
        for tokens in sizes:
            for odd in (False, True):
                write(tokens, dtype, odd, generator, device)
                gather(tokens, dtype, odd, generator, device)
                count += 2
    for tokens in FUSED_TOKENS:
        for odd in (False, True):
            for is_neox in (False, True):
                fused_write(tokens, odd, is_neox, generator, device)
                count += 1
    count += decode(generator, device)
    count += samples(generator, device)
    torch.cuda.synchronize()
    print(f"{count} calls, all as the reference")


def on_device(values: Tensor, device: torch.device, *, odd: bool) -> Tensor:
    """A copy; if `odd`, at an offset and a row stride of an odd number of elements."""
    if not odd:
        return values.contiguous().to(device)
    width = values.shape[-1]
    rows = values.numel() // width
    stride = width + 1 - width % 2
    flat = torch.zeros(1 + (rows - 1) * stride + width, dtype=values.dtype)
    flat.as_strided((rows, width), (stride, 1), 1).copy_(values.reshape(rows, width))
    strides = [stride]
    for size in reversed(values.shape[1:-1]):
        strides.append(strides[-1] * size)
    return flat.to(device).as_strided(values.shape, (*reversed(strides), 1), 1)


def some_slots(tokens: int, capacity: int, generator: torch.Generator) -> Tensor:
    """Distinct slots, some of them none of the cache's."""
    slots = torch.randperm(capacity, generator=generator)[:tokens]
    slots[1::7] = -1
    slots[2::7] = capacity + 5
    return slots


def expect_equal(got: Tensor, want: Tensor, what: str) -> None:
    if not torch.equal(got.cpu().contiguous().view(torch.uint8), want.view(torch.uint8)):
        raise AssertionError(f"{what}: the op and the reference differ")


def write(
    tokens: int, dtype: torch.dtype, odd: bool, generator: torch.Generator, device: torch.device
) -> None:
    latent = cases.latents((tokens, HEAD_DIM), dtype, generator)
    block_size = 5 if odd else 16
    num_blocks = tokens // block_size + 1
    shape = (num_blocks, block_size, RECORD_BYTES)
    cache = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    slots = some_slots(tokens, num_blocks * block_size, generator)
    kv_c, k_pe = latent[:, :NOPE_DIM], latent[:, NOPE_DIM:]
    written = on_device(cache, device, odd=odd)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=on_device(kv_c, device, odd=odd),
        k_pe=on_device(k_pe, device, odd=odd),
        kv_cache=written,
        slot_mapping=(slots.int() if odd else slots).to(device),
    )
    reference.concat_and_cache(kv_c, k_pe, cache, slots)
    expect_equal(written, cache, f"write, {tokens} tokens, {dtype}, odd {odd}")


def fused_write(
    tokens: int, odd: bool, is_neox: bool, generator: torch.Generator, device: torch.device
) -> None:
    latent = torch.randn(tokens, HEAD_DIM, generator=generator).bfloat16()
    num_blocks = tokens // 16 + 1
    cache = torch.randint(
        256, (num_blocks, 16, RECORD_BYTES), dtype=torch.uint8, generator=generator
    )
    slots = some_slots(tokens, num_blocks * 16, generator)
    positions = torch.randint(70, (tokens,), generator=generator)
    weight = (1 + torch.randn(1, NOPE_DIM, generator=generator) / 4).bfloat16()
    table = fused_cases.cos_sin_table(70, torch.bfloat16)
    written = on_device(cache, device, odd=odd)
    nvfp4_dsmla.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla(
        kv_c=on_device(latent[:, :NOPE_DIM], device, odd=odd),
        k_pe=on_device(latent[:, NOPE_DIM:], device, odd=odd),
        norm_weight=on_device(weight, device, odd=odd)[0],
        eps=1e-6,
        positions=positions.to(device),
        cos_sin_cache=on_device(table, device, odd=odd),
        is_neox=is_neox,
        kv_cache=written,
        slot_mapping=slots.to(device),
    )
    reference_fused.concat_and_cache(
        kv_c=latent[:, :NOPE_DIM],
        k_pe=latent[:, NOPE_DIM:],
        norm_weight=weight[0],
        eps=1e-6,
        positions=positions,
        cos_sin_cache=table,
        is_neox=is_neox,
        kv_cache=cache,
        slot_mapping=slots,
    )
    expect_equal(written, cache, f"fused write, {tokens} tokens, odd {odd}")


def gather(
    tokens: int, dtype: torch.dtype, odd: bool, generator: torch.Generator, device: torch.device
) -> None:
    latent = torch.randn(tokens, HEAD_DIM, generator=generator)
    block_size = 5 if odd else 16
    requests = 41 if odd else 3  # more than a warp holds, and fewer
    num_blocks = tokens // block_size + requests
    cache = torch.zeros(num_blocks, block_size, RECORD_BYTES, dtype=torch.uint8)
    every_slot = torch.randperm(num_blocks * block_size, generator=generator)[:tokens]
    reference.concat_and_cache(latent[:, :NOPE_DIM], latent[:, NOPE_DIM:], cache, every_slot)
    source = on_device(cache, device, odd=odd)
    slots = some_slots(tokens, num_blocks * block_size, generator)
    out = nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla(
        kv_cache=source, slots=(slots.int() if odd else slots).to(device), dtype=dtype
    )
    what = f"{tokens} tokens, {dtype}, odd {odd}"
    expect_equal(out, reference.gather(cache, slots, dtype), f"gather by slot, {what}")

    # Some requests are empty, some blocks none of the cache's, some rows past their table.
    starts = torch.randint(tokens, (requests,), generator=generator).sort().values.int()
    starts[0] = 0
    shape = (requests, max(num_blocks // 2, 1))
    table = torch.randint(-1, num_blocks + 1, shape, generator=generator).int()
    seq_starts = torch.randint(2 * block_size, (requests,), generator=generator).int()
    want = torch.full((tokens, HEAD_DIM), torch.nan, dtype=dtype)
    dst = on_device(want, device, odd=odd)
    nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache(
        src_cache=source,
        dst=dst,
        block_table=table.to(device),
        workspace_starts=starts.to(device),
        batch_size=requests,
        seq_starts=seq_starts.to(device) if odd else None,
    )
    reference.cp_gather(cache, want, table, starts, requests, seq_starts if odd else None)
    expect_equal(dst, want, f"gather by request, {what}")


def decode(generator: torch.Generator, device: torch.device) -> int:
    """Every decode kernel and each of its tiles of heads; wgmma's with splits and without."""
    small = [(1, 3, 70), (3, 16, 130), (2, 20, 300), (50, 40, 130), (70, 64, 130)]
    # On an H200 ten tiles of tokens by 64 heads, and none, one and ten; then 16, 32 and 64 with a
    # row's tokens shared out.
    uneven = (71, 64, 600)
    large = [(70, 64, 600), uneven, (4, 17, 2048), (8, 64, 2048), (36, 50, 2048)]
    count = 0
    for kernel, shapes in (("mma", small), ("", small + large)):  # wgmma's serve unless told
        os.environ["NVFP4_DSMLA_DECODE"] = kernel
        for shape in shapes:
            batch, heads, topk = shape
            lengths = [(0, 1, topk)[i % 3] for i in range(batch)] if shape is uneven else None
            for dtype in (torch.bfloat16, torch.float16):
                arguments = decode_cases.decode_arguments(
                    generator,
                    device,
                    batch=batch,
                    heads=heads,
                    topk=topk,
                    dtype=dtype,
                    lengths=lengths,
                )
                out, _ = nvfp4_dsmla.sparse_mla_decode(**arguments)
                on_host: dict[str, Any] = {
                    n: a.cpu() if torch.is_tensor(a) else a for n, a in arguments.items()
                }
                want, _ = reference.attention(**on_host)
                torch.testing.assert_close(out.cpu(), want, rtol=2**-6, atol=2**-6)
                count += 1
    del os.environ["NVFP4_DSMLA_DECODE"]
    return count


def samples(generator: torch.Generator, device: torch.device) -> int:
    """The tests' samples, which the tests compare."""
    ops = (
        (nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla, cases.WRITES),
        (
            nvfp4_dsmla.fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla,
            fused_cases.FUSED_WRITES,
        ),
        (nvfp4_dsmla.gather_and_upconvert_nvfp4_ds_mla, cases.GATHERS),
        (nvfp4_dsmla.cp_gather_and_upconvert_nvfp4_kv_cache, cases.CP_GATHERS),
        (nvfp4_dsmla.sparse_mla_decode, decode_cases.DECODES),
        (nvfp4_dsmla.merge_attention_states, decode_cases.MERGES),
    )
    for op, its_cases in ops:
        for case in its_cases:
            op(**case.make(generator, device))
            torch.cuda.synchronize()
    return sum(len(its_cases) for _, its_cases in ops)


if __name__ == "__main__":
    main()
