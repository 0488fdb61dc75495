"""sparse_mla_decode: attention to the records that the indices select, and to nothing else.

What may differ from the oracle is said once, in `assert_attention` of decode_oracle.py. What must
not depend on something (a record that is not selected, the rows beside a row, the number of
threads) is compared bit by bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

import nvfp4_dsmla
from cases import BF16, FP16, INT32, Case, copies_of
from compare import assert_latents_equal
from decode_cases import DECODES, Q_LAYOUTS, SCALE, decode_arguments
from decode_oracle import assert_same, attention, check, decode
from nvfp4_dsmla import layout, reference
from nvfp4_dsmla.layout import HEAD_DIM, NOPE_DIM, RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DECODES, ids=lambda case: case.name)
def test_sample(device: torch.device, case: Case, generator: torch.Generator) -> None:
    check(case.make(generator, device))


@pytest.mark.parametrize("topk", [0, 1, 63, 64, 65, 300])
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 17, 64, 128])
def test_sizes(device: torch.device, heads: int, topk: int, generator: torch.Generator) -> None:
    """Around the sizes of tiles and parts, on every kernel's number of heads."""
    check(
        decode_arguments(
            generator,
            device,
            heads=heads,
            topk=topk,
            num_blocks=4,
            block_size=64,
            s_q=1 + heads % 2,
        )
    )


# On an H200 these take the larger tiles of heads, which pay for many rows alone: 32, 64 and twice
# 64, then 32 and 64 with a row's tokens shared out. tests/cpp/decode_plan.cpp holds the plan to it.
@pytest.mark.parametrize(("dtype", "q_layout"), [(BF16, "packed"), (FP16, "unaligned")])
@pytest.mark.parametrize(
    ("rows", "heads", "topk"),
    [(70, 20, 300), (70, 33, 300), (40, 128, 300), (8, 64, 2048), (40, 50, 2048)],
)
def test_many_rows(
    device: torch.device,
    rows: int,
    heads: int,
    topk: int,
    dtype: torch.dtype,
    q_layout: str,
    generator: torch.Generator,
) -> None:
    check(
        decode_arguments(
            generator,
            device,
            batch=rows,
            heads=heads,
            topk=topk,
            dtype=dtype,
            q_layout=q_layout,
            num_blocks=50,
            block_size=64,
        )
    )


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("topk", [2048, 20_000])
def test_long_rows(
    device: torch.device, topk: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    check(
        decode_arguments(
            generator,
            device,
            batch=1,
            heads=16,
            topk=topk,
            dtype=dtype,
            num_blocks=50,
            block_size=64,
        )
    )


@pytest.mark.parametrize("q_layout", Q_LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 16, 64, 100])
def test_block_sizes_and_query_layouts(
    device: torch.device, block_size: int, q_layout: str, generator: torch.Generator
) -> None:
    check(
        decode_arguments(
            generator,
            device,
            s_q=2,
            topk=70,
            num_blocks=-(-100 // block_size),
            block_size=block_size,
            num_layers=2,
            layer=1,
            q_layout=q_layout,
        )
    )


@pytest.mark.parametrize("scale", [0.0, -0.05, 0.3, 3.0, 1e-30])
def test_scales(device: torch.device, scale: float, generator: torch.Generator) -> None:
    """3: scores in the hundreds, all weight on few tokens. The error of a score grows with it."""
    arguments = decode_arguments(generator, device, heads=17, topk=100, scale=scale)
    if scale < 1:
        check(arguments)
        return
    want = attention(**copies_of(arguments))
    out, lse = decode(arguments)
    torch.testing.assert_close(out.double().cpu(), want.out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double().cpu(), want.lse, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("power", "heads"), [(100, 1), (30, 1), (-30, 64), (-100, 64)])
@pytest.mark.parametrize("rows", [2, 70])  # on an H200 in tiles of 16 and of 64 heads
def test_magnitudes_of_queries(
    device: torch.device, power: int, heads: int, rows: int, generator: torch.Generator
) -> None:
    """Beyond fp16's range, in which CUDA multiplies: one head's do not matter to another's."""
    arguments = decode_arguments(
        generator, device, batch=rows, heads=64, topk=130, scale=SCALE * 2.0**-power
    )
    arguments["q"][:, :, :heads] *= 2.0**power
    check(arguments)


@pytest.mark.parametrize(
    ("code", "scale", "value"),
    [(7, 0x7E, 6 * 448.0), (1, 0x01, 0.5 * 2**-9)],
    ids=["most", "least"],
)
@pytest.mark.parametrize(("batch", "heads"), [(4, 17), (8, 64), (36, 50)])
def test_magnitudes_of_values(
    device: torch.device,
    batch: int,
    heads: int,
    code: int,
    scale: int,
    value: float,
    generator: torch.Generator,
) -> None:
    """Where CUDA shares a row's tokens out, whose partial results have 16 bits."""
    arguments = decode_arguments(generator, device, batch=batch, heads=heads, topk=2048)
    cache = arguments["kv_cache"]
    layout.codes(cache).fill_(code | code << 4)
    layout.scale_bytes(cache).fill_(scale)
    layout.rope_bytes(cache).zero_()
    out, _ = decode(arguments)
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), value), rtol=2**-8, atol=0)


@pytest.mark.parametrize("lengths", [None, "request", "row"])
@pytest.mark.parametrize("sink", [-math.inf, -3.0, 0.0, 8.0, 200.0, math.inf])
def test_sink(
    device: torch.device, sink: float, lengths: str | None, generator: torch.Generator
) -> None:
    values = {None: None, "request": [0, 70], "row": [[65, 0], [-4, 1]]}[lengths]
    arguments = decode_arguments(
        generator, device, s_q=2, heads=5, topk=70, lengths=values, sink=[sink] * 5
    )
    got = check(arguments)
    assert_latents_equal(got[1], decode({**arguments, "attn_sink": None})[1])
    if sink == math.inf:
        assert not got[0].any()


# On an H200 a row's tokens shared out, and tiles of 64 heads.
@pytest.mark.parametrize(("batch", "heads", "topk"), [(4, 17, 2048), (70, 64, 300)])
def test_rows_of_all_lengths(
    device: torch.device, batch: int, heads: int, topk: int, generator: torch.Generator
) -> None:
    lengths = [0, 1, 70, topk]
    check(
        decode_arguments(
            generator,
            device,
            batch=batch,
            heads=heads,
            topk=topk,
            num_blocks=50,
            lengths=[lengths[i % 4] for i in range(batch)],
            sink=[(-1) ** h * h / 4 for h in range(heads)],
        )
    )


def test_a_slot_named_twice_counts_twice(device: torch.device, generator: torch.Generator) -> None:
    once = decode_arguments(generator, device, topk=1, indices=[5])
    twice = {**once, "indices": once["indices"].repeat(1, 1, 2)}
    torch.testing.assert_close(decode(twice)[0], decode(once)[0], rtol=0, atol=0)
    torch.testing.assert_close(decode(twice)[1], decode(once)[1] + math.log(2), rtol=0, atol=2e-6)


# ---- what is no token, and what is not selected ------------------------------------------------


def test_indices_outside_the_cache_are_no_tokens(
    device: torch.device, generator: torch.Generator
) -> None:
    outside = [-1, INT32.min, INT32.max, 48, 49, -48]
    arguments = decode_arguments(generator, device, heads=16, topk=6, indices=outside)
    out, lse = check(arguments)
    assert not out.any()
    assert lse.isneginf().all()
    arguments["indices"][..., 3] = 47
    check(arguments)


# Few heads, and what an H200 serves in tiles of 64.
SHAPES = pytest.mark.parametrize(("batch", "heads"), [(2, 17), (70, 64)])


@SHAPES
def test_records_that_are_not_selected_reach_nothing(
    device: torch.device, batch: int, heads: int, generator: torch.Generator
) -> None:
    """Slots 3, 5 and 40 are selected; 17 is, but past topk_length. All others become NaN."""
    indices = [40, -1, 5, 3, 17, *[-1] * 125]
    arguments = decode_arguments(
        generator, device, batch=batch, heads=heads, topk=130, indices=indices, lengths=[4] * batch
    )
    want = decode(arguments)
    cache = arguments["kv_cache"].view(-1, RECORD_BYTES)
    kept = cache[[3, 5, 40]].clone()
    cache.fill_(0xFF)
    cache[[3, 5, 40]] = kept
    assert_same(decode(arguments), want)


@SHAPES
def test_an_empty_cache(
    device: torch.device, batch: int, heads: int, generator: torch.Generator
) -> None:
    out, lse = check(
        decode_arguments(generator, device, batch=batch, heads=heads, topk=130, num_blocks=0)
    )
    assert not out.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize(
    ("batch", "heads", "topk"), [(2, 17, 130), (70, 64, 130), (4, 17, 2048)]
)  # as above, and a row's tokens shared out
@pytest.mark.parametrize("byte", [256, 319, 320, 351])
def test_a_nan_reaches_its_own_rows_only(
    device: torch.device,
    byte: int,
    batch: int,
    heads: int,
    topk: int,
    generator: torch.Generator,
) -> None:
    arguments = decode_arguments(generator, device, batch=batch, s_q=2, heads=heads, topk=topk)
    arguments["indices"].remainder_(47)  # slot 47 nowhere yet
    want = decode(arguments)
    arguments["indices"][1, 1, topk // 2 + 1] = 47
    arguments["kv_cache"].view(-1, RECORD_BYTES)[47, byte] = 0x7F
    got = decode(arguments)
    for part, other in zip(got, want, strict=True):
        assert part[1, 1].isnan().all()
        part[1, 1] = other[1, 1]
    assert_same(got, want)


@SHAPES
def test_scores_of_many_millions(device: torch.device, batch: int, heads: int) -> None:
    """Where floats are 4 apart. The second token's score is far enough above the others for a tile
    of its own to exceed what 16-bit weights hold, were it not for a new maximum."""
    latents = torch.zeros(2, HEAD_DIM)
    latents[:, 0], latents[1, 16] = 6.0, 6.0
    cache = nvfp4_dsmla.allocate_kv_cache(num_blocks=1, block_size=2, device=device)
    nvfp4_dsmla.concat_and_cache_nvfp4_ds_mla(
        kv_c=latents[:, :NOPE_DIM].to(device),
        k_pe=latents[:, NOPE_DIM:].to(device),
        kv_cache=cache,
        slot_mapping=torch.arange(2, device=device),
    )
    q = torch.zeros(batch, 1, heads, HEAD_DIM, dtype=BF16, device=device)
    indices = torch.zeros(batch, 1, 130, dtype=torch.int32, device=device)
    indices[..., 65] = 1
    for above in (1.0, 5.5, 11.0, 16.0):
        q[..., 0], q[..., 16] = 2.0**22, above / 6
        out, lse = nvfp4_dsmla.sparse_mla_decode(
            q=q, kv_cache=cache, indices=indices, softmax_scale=1.0
        )
        assert lse.isfinite().all()
        torch.testing.assert_close(out[..., 0], torch.full_like(out[..., 0], 6.0))
        assert ((out[..., 16] >= 0) & (out[..., 16] <= 6)).all()


def test_cache_of_more_than_two_to_the_31_bytes(
    device: torch.device, generator: torch.Generator
) -> None:
    arguments = decode_arguments(generator, device, topk=2, num_blocks=2, indices=[0, 31])
    small = arguments["kv_cache"]
    stride = 2**31 + RECORD_BYTES
    memory = torch.empty(stride + 16 * RECORD_BYTES, dtype=torch.uint8, device=device)
    large = memory.as_strided(small.shape, (stride, RECORD_BYTES, 1))
    large.copy_(small)
    assert_same(decode({**arguments, "kv_cache": large}), decode(arguments))


# ---- what a row does not depend on -------------------------------------------------------------


def test_two_calls_give_the_same_bits(device: torch.device, generator: torch.Generator) -> None:
    arguments = decode_arguments(
        generator, device, batch=3, heads=40, topk=2000, num_blocks=20, block_size=64
    )
    assert_same(decode(arguments), decode(arguments))


def test_a_row_alone_and_in_a_batch(device: torch.device, generator: torch.Generator) -> None:
    """The CPU cuts every row in the same way. CUDA has more splits for fewer rows, so the sums are
    taken in another order, and a weight may be rounded to 16 bits against another maximum."""
    arguments = decode_arguments(
        generator, device, batch=5, s_q=2, heads=17, topk=700, num_blocks=20, block_size=64
    )
    out, lse = decode(arguments)
    alone = decode(
        {
            **arguments,
            "q": arguments["q"][3:4, 1:],
            "indices": arguments["indices"][3:4, 1:],
        }
    )
    if device.type == "cpu":
        assert_same(alone, (out[3:4, 1:], lse[3:4, 1:]))
    else:
        torch.testing.assert_close(alone[0], out[3:4, 1:], rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(alone[1], lse[3:4, 1:], rtol=2**-12, atol=2**-12)


def test_a_head_alone_and_among_others(generator: torch.Generator) -> None:
    """Heads are padded, and kernels differ by their number: those for 8 heads and fewer, too."""
    cpu = torch.device("cpu")
    arguments = decode_arguments(generator, cpu, heads=40, topk=100)
    out, lse = decode(arguments)
    for heads in (slice(33, 34), slice(2, 7), slice(3, 19)):
        part = decode({**arguments, "q": arguments["q"][:, :, heads]})
        assert_same(part, (out[:, :, heads], lse[:, :, heads]))


@pytest.fixture
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("restore_threads")
def test_the_number_of_threads_changes_no_bit(generator: torch.Generator) -> None:
    arguments = decode_arguments(
        generator, torch.device("cpu"), batch=3, heads=9, topk=1500, num_blocks=9, block_size=64
    )
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(decode(arguments))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_more_rows_than_are_taken_at_a_time(generator: torch.Generator) -> None:
    """128 heads and 64 parts a row: the CPU takes four rows at a time, so here three times."""
    arguments = decode_arguments(generator, torch.device("cpu"), batch=9, heads=128, topk=16_384)
    places = torch.arange(0, 16_384, 1021)
    arguments["indices"].fill_(-1)
    arguments["indices"][..., places] = torch.arange(9 * 17).remainder(48).int().view(9, 1, 17)
    check(arguments)


# ---- against the package's own reference -------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_reference_in_fp32(
    device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Over all of out, relative: 2.1e-3 is what the public fp8 kernel is off by, most of it the
    rounding of out to bfloat16. CUDA rounds weights to fp16, the CPU none."""
    arguments = decode_arguments(
        generator, device, batch=2, heads=16, topk=500, dtype=dtype, num_blocks=20, block_size=64
    )
    out, lse = decode(arguments)
    wide = {**arguments, "q": arguments["q"].float()}
    want_out, want_lse = reference.attention(**wide)
    error = (out.float() - want_out).norm() / want_out.norm()
    assert error <= (2.1e-3 if dtype == BF16 or device.type == "cuda" else 3e-4)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
