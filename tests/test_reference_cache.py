"""The reference's cache functions and attention against loops over single tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from compare import assert_latents_equal, assert_records_equal
from nvfp4_dsmla import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LAYERS, BLOCKS, BLOCK_SIZE = 3, 5, 4
CAPACITY = BLOCKS * BLOCK_SIZE
FAR = [CAPACITY, -1, -CAPACITY, 2**31 - 1, -(2**31)]  # slots that are no token


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(
        256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def random_latent(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, 576, generator=torch.Generator().manual_seed(seed))


def record_cache(device: torch.device) -> Tensor:
    """One layer of random tokens."""
    latent = random_latent(BLOCKS, BLOCK_SIZE)
    return reference.encode(latent[..., :512], latent[..., 512:]).to(device)


def strided_pool(device: torch.device) -> Tensor:
    """Pool order over a [blocks, layers, ...] allocation with padded pages and records."""
    store = random_bytes(BLOCKS, LAYERS, BLOCK_SIZE + 1, 352 + 16).to(device)
    return store[:, :, :BLOCK_SIZE, :352].transpose(0, 1)


# ---- concat_and_cache


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "slots",
    [
        pytest.param([7, 0, 19, 4], id="all written"),
        pytest.param([-1, 7, CAPACITY, 0, -5, 19], id="some skipped"),
        pytest.param([0, -1, -1], id="slot 0 written and others skipped"),
        pytest.param(FAR, id="all skipped"),
        pytest.param([], id="no tokens"),
    ],
)
def test_write_puts_each_record_in_its_slot_and_touches_nothing_else(
    device: torch.device, slots: list[int], slot_dtype: torch.dtype
) -> None:
    latent = random_latent(len(slots) + 2).to(device, torch.bfloat16)  # two tokens too many
    pool = strided_pool(device)
    want = pool.clone()
    records = reference.encode(latent[:, :512], latent[:, 512:])
    for token, slot in enumerate(slots):
        if 0 <= slot < CAPACITY:
            want[1, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = records[token]
    mapping = torch.tensor(slots, dtype=slot_dtype, device=device)
    reference.concat_and_cache(latent[:, :512], latent[:, 512:], pool, mapping, layer=1)
    assert_records_equal(pool, want)


def test_write_to_one_layer_is_write_to_a_pool_of_one(device: torch.device) -> None:
    latent = random_latent(3).to(device)
    slots = torch.tensor([5, -1, 2], device=device)
    layer = random_bytes(BLOCKS, BLOCK_SIZE, 352).to(device)
    pool = layer.clone()[None]
    reference.concat_and_cache(latent[:, :512], latent[:, 512:], layer, slots)
    reference.concat_and_cache(latent[:, :512], latent[:, 512:], pool, slots, layer=0)
    assert_records_equal(layer, pool[0])


def test_write_into_a_cache_without_blocks_skips_all(device: torch.device) -> None:
    latent = random_latent(2).to(device)
    empty = torch.zeros(0, BLOCK_SIZE, 352, dtype=torch.uint8, device=device)
    slots = torch.tensor([0, 1], device=device)
    reference.concat_and_cache(latent[:, :512], latent[:, 512:], empty, slots)


# ---- gather


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_gather_decodes_slots_and_zeroes_what_is_no_token(
    device: torch.device, slot_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    pool = strided_pool(device)
    slots = torch.tensor([[0, 19, 7, 7, 4], FAR], dtype=slot_dtype, device=device)
    got = reference.gather(pool, slots, dtype, layer=2)
    decoded = reference.decode(pool[2].reshape(-1, 352), dtype)
    want = torch.stack([decoded[[0, 19, 7, 7, 4]], torch.zeros_like(decoded[:5])])
    assert_latents_equal(got, want)
    assert_latents_equal(reference.gather(pool[2], slots, dtype), want)


def test_gather_of_no_slot_and_of_no_cache(device: torch.device) -> None:
    cache = record_cache(device)
    none = torch.zeros(2, 0, dtype=torch.int64, device=device)
    assert reference.gather(cache, none).shape == (2, 0, 576)
    some = torch.zeros(2, dtype=torch.int64, device=device)
    assert reference.gather(cache[:0], some).tolist() == torch.zeros(2, 576).tolist()


# ---- cp_gather


def gathered_by_loop(
    cache: Tensor, dst: Tensor, table: list[list[int]], starts: list[int], skipped: list[int]
) -> Tensor:
    want = torch.zeros_like(dst)
    for row in range(len(dst)):
        owners = [request for request, start in enumerate(starts) if start <= row]
        if not owners:
            continue
        request = owners[-1]
        token = row - starts[request] + skipped[request]
        column = token // BLOCK_SIZE
        if 0 <= column < len(table[request]) and 0 <= table[request][column] < BLOCKS:
            record = cache[table[request][column], token % BLOCK_SIZE]
            want[row] = reference.decode(record, dst.dtype)
    return want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("starts", "skipped"),
    [
        pytest.param([0, 5, 9], None, id="three requests"),
        pytest.param([0, 5, 9], [3, 0, 4], id="with tokens left out"),
        pytest.param([0, 0, 9], None, id="an empty request first"),
        pytest.param([0, 9, 9], [1, 2, 3], id="an empty request between"),
        pytest.param([0, 5, 14], None, id="an empty request last"),
        pytest.param([2, 5, 9], None, id="rows before every request"),
        pytest.param([2, 5, 9], [3, 0, 4], id="such rows and tokens left out"),
        pytest.param([0, 5, 9], [-2, 0, 2**31 - 1], id="tokens out of every table"),
    ],
)
def test_cp_gather_is_the_loop_over_rows(
    device: torch.device, starts: list[int], skipped: list[int] | None, dtype: torch.dtype
) -> None:
    table = [[4, 0], [BLOCKS, 3], [2, -1]]  # short rows and bad blocks: some rows are zero
    pool = strided_pool(device)
    dst = torch.full((14, 600), math.nan, dtype=dtype, device=device)
    reference.cp_gather(
        pool,
        dst[:, :576],
        torch.tensor(table, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        len(starts),
        torch.tensor(skipped, dtype=torch.int32, device=device) if skipped else None,
        layer=1,
    )
    want = gathered_by_loop(pool[1], dst[:, :576], table, starts, skipped or [0, 0, 0])
    assert_latents_equal(dst[:, :576], want)
    assert dst[:, 576:].isnan().all()


@pytest.mark.parametrize("missing", ["requests", "table columns", "blocks"])
def test_cp_gather_zeroes_every_row_without(device: torch.device, missing: str) -> None:
    cache = record_cache(device)[: 0 if missing == "blocks" else BLOCKS]
    dst = torch.full((3, 576), math.nan, device=device)
    table = torch.zeros(1, 0 if missing == "table columns" else 2, dtype=torch.int32, device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    reference.cp_gather(cache, dst, table, starts, 0 if missing == "requests" else 1)
    assert dst.tolist() == torch.zeros(3, 576).tolist()


def test_cp_gather_of_no_rows(device: torch.device) -> None:
    table = torch.zeros(1, 2, dtype=torch.int32, device=device)
    dst = torch.zeros(0, 576, device=device)
    reference.cp_gather(record_cache(device), dst, table, table[:, 0], 1)


# ---- attention


def attended_by_loop(case: dict[str, Any], lengths: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, a query row and head at a time, over the tokens of that row alone."""
    q, indices = case["q"], case["indices"]
    latent = reference.decode(case["kv_cache"].reshape(-1, 352), torch.float32).double()
    batch, s_q, heads, _ = q.shape
    out = torch.zeros(batch, s_q, heads, 512, dtype=torch.float64)
    lse = torch.full((batch, s_q, heads), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for s in range(s_q):
            row = indices[b, s, : max(int(lengths[b, s]), 0)].tolist()
            tokens = latent[[slot for slot in row if 0 <= slot < len(latent)]]
            for h in range(heads if len(tokens) else 0):
                weights = torch.exp(tokens @ q[b, s, h].double() * case["softmax_scale"])
                lse[b, s, h] = weights.sum().log()
                total = weights.sum() + torch.exp(sink[h].double())
                out[b, s, h] = (weights[:, None] * tokens[:, :512]).sum(dim=0) / total
    return out, lse


def attention_case(seed: int = 0) -> dict[str, Any]:
    """Two requests of two rows: plain, padded, one token twice, nothing but padding."""
    cache = record_cache(torch.device("cpu"))
    indices = torch.tensor(
        [
            [[0, 3, 19, 8, 11, 5], [7, -1, 2, CAPACITY, 2**31 - 1, 9]],
            [[4, 4, 6, -(2**31), 1, 0], FAR[:3] + FAR[:3]],
        ],
        dtype=torch.int32,
    )
    q = random_latent(2, 2, 3, seed=seed)
    return {"q": q, "kv_cache": cache, "indices": indices, "softmax_scale": 576**-0.5}


NO_LIMIT = torch.full((2, 2), 2**31 - 1)
NO_SINK = torch.full((3,), -math.inf)


def on(device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in case.items()}


def assert_attention_close(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], *, rtol: float, atol: float
) -> None:
    for got_part, want_part in zip(got, want, strict=True):
        torch.testing.assert_close(got_part.double().cpu(), want_part, rtol=rtol, atol=atol)


@pytest.mark.parametrize("sink", [None, [0.5, -math.inf, 30.0]])
@pytest.mark.parametrize("lengths", [None, [4, 2], [[6, 3], [0, 6]], [[-1, 1], [2, 2**31 - 1]]])
def test_attention_is_the_dense_softmax_over_the_selected_tokens(
    device: torch.device, lengths: list[Any] | None, sink: list[float] | None
) -> None:
    case = attention_case()
    limit = NO_LIMIT if lengths is None else torch.tensor(lengths).reshape(2, -1).expand(2, 2)
    sinks = NO_SINK if sink is None else torch.tensor(sink)
    want = attended_by_loop(case, limit, sinks)
    if lengths is not None:
        case["topk_length"] = torch.tensor(lengths, dtype=torch.int32)
    if sink is not None:
        case["attn_sink"] = sinks
    got = reference.attention(**on(device, case))
    assert (got[0].dtype, got[1].dtype) == (torch.float32, torch.float32)
    assert_attention_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_of_narrow_queries_differs_by_the_rounding_of_out(
    device: torch.device, dtype: torch.dtype
) -> None:
    case = attention_case()
    case["q"] = case["q"].to(dtype)
    wide = reference.attention(**on(device, {**case, "q": case["q"].float()}))
    out, lse = reference.attention(**on(device, case))
    assert_latents_equal(out, wide[0].to(dtype))
    assert_latents_equal(lse, wide[1])


def test_attention_of_empty_rows_is_zero_with_lse_minus_infinity(device: torch.device) -> None:
    case = on(device, attention_case())
    case["attn_sink"] = torch.tensor([0.0, -math.inf, math.inf], device=device)
    out, lse = reference.attention(**case)
    assert out[1, 1].tolist() == torch.zeros(3, 512).tolist()
    assert lse[1, 1].tolist() == [-math.inf] * 3
    case["indices"] = case["indices"][..., :0]
    out, lse = reference.attention(**case)
    assert out.tolist() == torch.zeros(2, 2, 3, 512).tolist()
    assert lse.tolist() == torch.full((2, 2, 3), -math.inf).tolist()


def test_attention_never_sees_records_that_are_not_selected(device: torch.device) -> None:
    case = on(device, attention_case())
    case["topk_length"] = torch.tensor([4, 2], dtype=torch.int32, device=device)
    want = reference.attention(**case)
    selected = {0, 3, 19, 8, 7, 2, 4}  # request 0: its rows' first four; request 1: first two
    others = [slot for slot in range(CAPACITY) if slot not in selected]
    case["kv_cache"].view(-1, 352)[others] = 0xFF  # NaN scales and NaN RoPE
    got = reference.attention(**case)
    assert not got[0].isnan().any()
    assert_latents_equal(got[0], want[0])
    assert_latents_equal(got[1], want[1])


def test_attention_keeps_a_selected_nan_in_its_own_rows(device: torch.device) -> None:
    case = on(device, attention_case())
    want = reference.attention(**case)
    case["kv_cache"].view(-1, 352)[19, 256] = 0x7F  # one RoPE dim of a token of row 0, 0 alone
    out, lse = reference.attention(**case)
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan().all()
    assert_latents_equal(out.flatten(0, 1)[1:], want[0].flatten(0, 1)[1:])
    assert_latents_equal(lse.flatten(0, 1)[1:], want[1].flatten(0, 1)[1:])


# ---- torch.compile


def compiled_cases(device: torch.device) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    latent = random_latent(6).to(device, torch.bfloat16)
    pool = strided_pool(device).contiguous()
    case = on(device, attention_case())
    slots = torch.tensor([3, -1, 7, CAPACITY, 0, 12], device=device)
    table = torch.tensor([[4, 0], [BLOCKS, 3]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    dst = torch.zeros(9, 576, dtype=torch.bfloat16, device=device)
    lengths = torch.tensor([4, 2], dtype=torch.int32, device=device)
    sink = torch.tensor([0.5, -math.inf, 30.0], device=device)
    halves = [latent[:, :512], latent[:, 512:]]
    return {
        "concat_and_cache": (reference.concat_and_cache, [*halves, pool, slots, 1]),
        "cp_gather": (reference.cp_gather, [pool, dst, table, starts, 2, starts, 1]),
        "attention": (reference.attention, [*case.values(), lengths, sink]),
    }


def run(function: Callable[..., Any], arguments: list[Any]) -> list[Tensor]:
    """The results, and the arguments as the call leaves them."""
    arguments = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    results = function(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    return [t for t in (*results, *arguments) if isinstance(t, torch.Tensor)]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, in Inductor
@pytest.mark.parametrize(
    ("name", "dynamic", "backend"),
    [
        ("concat_and_cache", False, "aot_eager"),
        ("concat_and_cache", True, "eager"),
        pytest.param("concat_and_cache", False, "inductor", marks=pytest.mark.slow),
        ("cp_gather", False, "aot_eager"),
        ("cp_gather", True, "eager"),
        pytest.param("cp_gather", False, "inductor", marks=pytest.mark.slow),
        ("attention", False, "aot_eager"),
        ("attention", True, "eager"),
    ],
)
def test_traces_as_one_graph_with_the_same_result(
    device: torch.device, name: str, dynamic: bool, backend: str
) -> None:
    """The three take in encode, decode and gather as well. All but sums have the same bits."""
    rtol, atol = (1e-5, 1e-6) if name == "attention" else (0, 0)
    torch.compiler.reset()
    function, arguments = compiled_cases(device)[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for got, want in zip(run(compiled, arguments), run(function, arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


# ---- errors


def test_errors_name_the_argument_and_what_it_was(device: torch.device) -> None:
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    cache = record_cache(device)
    with pytest.raises(ValueError, match=r"kv_cache: wanted .*, got \[5, 4, 351\]"):
        reference.gather(cache[..., 1:], slots)
    with pytest.raises(ValueError, match=r"layer: wanted a number in \[0, 1\), got 1"):
        reference.gather(cache, slots, layer=1)
    with pytest.raises(ValueError, match=r"layer: wanted a number in \[0, 3\), got -1"):
        reference.gather(cache[None].expand(3, -1, -1, -1), slots, layer=-1)
