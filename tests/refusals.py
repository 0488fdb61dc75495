"""What each op must refuse: arguments that are good but for one, and the message it has to give."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvfp4_dsmla.layout import RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Arguments = dict[str, Any]

WRITE = "concat_and_cache_nvfp4_ds_mla"
CP_GATHER = "cp_gather_and_upconvert_nvfp4_kv_cache"
GATHER = "gather_and_upconvert_nvfp4_ds_mla"
DECODE = "sparse_mla_decode"
MERGE = "merge_attention_states"
FUSED = "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla"

WANTED_CACHE = (
    "wanted uint8 of shape [num_blocks, block_size, 352] or [num_layers, num_blocks, block_size, "
    "352] with block_size >= 1 and contiguous records"
)
CACHE_SHAPE = (2, 3, RECORD_BYTES)


def good_arguments(op: str, device: torch.device) -> Arguments:
    cache = torch.zeros(CACHE_SHAPE, dtype=torch.uint8, device=device)
    two = torch.tensor([0, 3], dtype=torch.int32, device=device)
    if op in (WRITE, FUSED):
        write = {
            "kv_c": torch.ones(4, 512, dtype=torch.bfloat16, device=device),
            "k_pe": torch.ones(4, 64, dtype=torch.bfloat16, device=device),
            "kv_cache": cache,
            "slot_mapping": torch.arange(4, device=device),
            "layer": 0,
        }
        norm_and_rope = {
            "norm_weight": torch.ones(512, dtype=torch.bfloat16, device=device),
            "eps": 1e-6,
            "positions": torch.arange(4, device=device),
            "cos_sin_cache": torch.ones(4, 64, dtype=torch.bfloat16, device=device),
            "is_neox": True,
            "round_to_input": True,
        }
        return write if op == WRITE else write | norm_and_rope
    if op == CP_GATHER:
        return {
            "src_cache": cache,
            "dst": torch.full((4, 576), torch.nan, dtype=torch.bfloat16, device=device),
            "block_table": two.new_zeros(2, 2),
            "workspace_starts": two,
            "batch_size": 2,
            "seq_starts": two.new_zeros(2),
            "layer": 0,
        }
    if op == DECODE:
        return {
            "q": torch.ones(2, 1, 3, 576, dtype=torch.bfloat16, device=device),
            "kv_cache": cache,
            "indices": two.new_zeros(2, 1, 4),
            "softmax_scale": 0.1,
            "topk_length": two,
            "attn_sink": torch.zeros(3, device=device),
            "layer": 0,
        }
    if op == MERGE:
        out = torch.ones(2, 3, 512, dtype=torch.bfloat16, device=device)
        lse = torch.zeros(2, 3, device=device)
        return {"out_a": out, "lse_a": lse, "out_b": out.clone(), "lse_b": lse.clone()}
    return {
        "kv_cache": cache,
        "slots": torch.arange(4, device=device),
        "dtype": None,
        "layer": 0,
    }


def replaced(name: str, change: Callable[[Tensor], object]) -> Callable[[Arguments], None]:
    def change_arguments(arguments: Arguments) -> None:
        arguments[name] = change(arguments[name])

    return change_arguments


class Refusal(NamedTuple):
    name: str
    op: str
    change: Callable[[Arguments], None]
    message: str


def case(
    op: str, name: str, change: Callable[[Any], object], wanted: str, got: str, what: str
) -> Refusal:
    """`change` makes argument `name` bad; `what` names the case."""
    message = f"{op}: {name}: {wanted}, got {got}"
    return Refusal(f"{op}-{name}-{what}", op, replaced(name, change), message)


def cache_cases(op: str, name: str) -> list[Refusal]:
    def strided(*strides: int) -> Callable[[Tensor], Tensor]:
        return lambda t: t.new_zeros(5000).as_strided(CACHE_SHAPE, strides)

    def bad(change: Callable[[Tensor], Tensor], got: str, what: str) -> Refusal:
        return case(op, name, change, WANTED_CACHE, got, what)

    pool = [*CACHE_SHAPE]
    return [
        bad(lambda t: t.char(), "int8 [2, 3, 352] with strides [1056, 352, 1]", "dtype"),
        bad(lambda t: t.half(), "float16 [2, 3, 352] with strides [1056, 352, 1]", "half"),
        bad(
            lambda t: t.view(torch.float8_e4m3fn),
            "float8_e4m3fn [2, 3, 352] with strides [1056, 352, 1]",
            "float8",
        ),
        bad(lambda t: t[0], "uint8 [3, 352] with strides [352, 1]", "two_dims"),
        bad(
            lambda t: t[None, None], f"uint8 {[1, 1, *pool]} with strides [2112, 2112", "five_dims"
        ),
        bad(lambda t: t[..., 1:], "uint8 [2, 3, 351] with strides [1056, 352, 1]", "width"),
        bad(lambda t: t[:, :0], "uint8 [2, 0, 352] with strides [1056, 352, 1]", "no_tokens"),
        bad(strided(1, 2, 6), "uint8 [2, 3, 352] with strides [1, 2, 6]", "record_with_gaps"),
    ]


def layer_case(op: str, cache: str, num_layers: int | None, layer: int) -> Refusal:
    def change(arguments: Arguments) -> None:
        if num_layers is not None:
            arguments[cache] = arguments[cache].new_zeros(num_layers, *CACHE_SHAPE)
        arguments["layer"] = layer

    wanted = f"wanted 0 <= layer < {num_layers or (1 if num_layers is None else 0)}"
    message = f"{op}: layer: {wanted}, the layers of {cache}, got {layer}"
    return Refusal(f"{op}-layer-{layer}_of_{num_layers}", op, change, message)


def layer_cases(op: str, cache: str) -> list[Refusal]:
    wrong = [(None, 1), (None, -1), (3, 3), (3, -1), (3, 2**40), (0, 0)]
    return [layer_case(op, cache, num_layers, layer) for num_layers, layer in wrong]


def row_cases(op: str, name: str, width: int) -> list[Refusal]:
    wanted = (
        f"wanted bfloat16, float16 or float32 of shape [tokens, {width}] with a contiguous last "
        "dimension"
    )

    def bad(change: Callable[[Tensor], Tensor], got: str, what: str) -> Refusal:
        return case(op, name, change, wanted, got, what)

    return [
        bad(lambda t: t.double(), f"float64 [4, {width}] with strides [{width}, 1]", "float64"),
        bad(lambda t: t.short(), f"int16 [4, {width}] with strides [{width}, 1]", "int16"),
        bad(lambda t: t.bool(), f"bool [4, {width}] with strides [{width}, 1]", "bool"),
        bad(
            lambda t: t.to(torch.complex64),
            f"dtype number 9 [4, {width}] with strides [{width}, 1]",
            "complex",
        ),
        bad(
            lambda t: t[:, None],
            f"bfloat16 [4, 1, {width}] with strides [{width}, {width}, 1]",
            "three_dims",
        ),
        bad(lambda t: t[0], f"bfloat16 [{width}] with strides [1]", "one_dim"),
        bad(lambda t: t[:, 1:], f"bfloat16 [4, {width - 1}] with strides [{width}, 1]", "width"),
        bad(
            lambda t: t.t().contiguous().t(),
            f"bfloat16 [4, {width}] with strides [1, 4]",
            "column_major",
        ),
    ]


def overlapping(*strides: int, layers: int | None = None) -> Callable[[Tensor], Tensor]:
    shape = CACHE_SHAPE if layers is None else (layers, *CACHE_SHAPE)
    return lambda t: t.new_zeros(20_000).as_strided(shape, (*strides, 1))


def apart_case(op: str, strides: tuple[int, ...], layers: int | None = None) -> Refusal:
    shape = [*CACHE_SHAPE] if layers is None else [layers, *CACHE_SHAPE]
    return case(
        op,
        "kv_cache",
        overlapping(*strides, layers=layers),
        "wanted strides that keep records apart",
        f"uint8 {shape} with strides {[*strides, 1]}",
        f"strides_{'_'.join(map(str, strides))}",
    )


def rows_at(stride: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.new_zeros(5000).as_strided((4, 576), (stride, 1))


def always(value: object) -> Callable[[object], object]:
    return lambda _: value


def int32_cases(name: str, shape: str, dims: int) -> list[Refusal]:
    wanted = f"wanted int32 of shape {shape}"
    sizes, strides = ("[2, 2]", "[2, 1]") if dims == 2 else ("[2]", "[1]")
    more, more_strides = ("[1, 2, 2]", "[4, 2, 1]") if dims == 2 else ("[1, 2]", "[2, 1]")

    def bad(change: Callable[[Tensor], Tensor], got: str, what: str) -> Refusal:
        return case(CP_GATHER, name, change, wanted, got, what)

    return [
        bad(lambda t: t.long(), f"int64 {sizes} with strides {strides}", "int64"),
        bad(lambda t: t.float(), f"float32 {sizes} with strides {strides}", "float32"),
        bad(lambda t: t[None], f"int32 {more} with strides {more_strides}", "more_dims"),
    ]


def write_cases(op: str) -> list[Refusal]:
    return [
        *cache_cases(op, "kv_cache"),
        *layer_cases(op, "kv_cache"),
        apart_case(op, (1056, 351)),  # tokens overlap in their last byte
        apart_case(op, (1055, 352)),  # blocks do
        apart_case(op, (0, 352)),  # all blocks are one
        apart_case(op, (352, 352)),
        apart_case(op, (352, 703)),  # interleaved, one byte short
        apart_case(op, (2111, 1056, 352), layers=2),  # layers overlap
        apart_case(op, (351, 2112, 704), layers=2),  # tokens_first, one byte short
        *row_cases(op, "kv_c", 512),
        *row_cases(op, "k_pe", 64),
        case(
            op,
            "k_pe",
            lambda t: t.half(),
            "wanted the dtype of kv_c (bfloat16)",
            "float16 [4, 64] with strides [64, 1]",
            "another_dtype",
        ),
        *(
            case(
                op,
                "slot_mapping",
                change,
                "wanted int64 or int32 of shape [tokens]",
                got,
                what,
            )
            for change, got, what in (
                (lambda t: t.short(), "int16 [4] with strides [1]", "int16"),
                (lambda t: t.float(), "float32 [4] with strides [1]", "float32"),
                (lambda t: t[None], "int64 [1, 4] with strides [4, 1]", "two_dims"),
                (lambda t: t[0], "int64 [] with strides []", "no_dims"),
            )
        ),
        *(
            case(
                op,
                name,
                lambda t: t[:3],
                "wanted a row for each of slot_mapping's 4 tokens",
                f"bfloat16 [3, {width}] with strides [{width}, 1]",
                "too_few",
            )
            for name, width in (("kv_c", 512), ("k_pe", 64))
        ),
    ]


WRITE_CASES = write_cases(WRITE)

CP_GATHER_CASES = [
    *cache_cases(CP_GATHER, "src_cache"),
    *layer_cases(CP_GATHER, "src_cache"),
    *row_cases(CP_GATHER, "dst", 576),
    *(
        case(
            CP_GATHER,
            "dst",
            rows_at(stride),
            "wanted rows that do not overlap",
            f"bfloat16 [4, 576] with strides [{stride}, 1]",
            f"stride_{stride}",
        )
        for stride in (0, 1, 575)
    ),
    case(CP_GATHER, "batch_size", lambda _: -1, "wanted 0 or more", "-1", "negative"),
    *int32_cases("block_table", "[batch_size or more, max_blocks]", 2),
    *int32_cases("workspace_starts", "[batch_size or more]", 1),
    *int32_cases("seq_starts", "[batch_size or more]", 1),
    case(
        CP_GATHER,
        "block_table",
        lambda t: t[:1],
        "wanted a row for each of the 2 requests",
        "int32 [1, 2] with strides [2, 1]",
        "too_few",
    ),
    *(
        case(
            CP_GATHER,
            name,
            lambda t: t[:1],
            "wanted an entry for each of the 2 requests",
            "int32 [1] with strides [1]",
            "too_few",
        )
        for name in ("workspace_starts", "seq_starts")
    ),
]

GATHER_CASES = [
    *cache_cases(GATHER, "kv_cache"),
    *layer_cases(GATHER, "kv_cache"),
    *(
        case(GATHER, "slots", change, "wanted int32 or int64", got, what)
        for change, got, what in (
            (lambda t: t.short(), "int16 [4] with strides [1]", "int16"),
            (lambda t: t.byte()[None], "uint8 [1, 4] with strides [4, 1]", "uint8"),
            (lambda t: t.double(), "float64 [4] with strides [1]", "float64"),
        )
    ),
    *(
        case(
            GATHER,
            "dtype",
            always(dtype),
            "wanted bfloat16, float16 or float32",
            str(dtype).removeprefix("torch."),
            str(dtype).removeprefix("torch."),
        )
        for dtype in (torch.float64, torch.uint8, torch.float8_e4m3fn)
    ),
]


def cases(
    op: str, name: str, wanted: str, *bad: tuple[Callable[[Any], object], str, str]
) -> list[Refusal]:
    return [case(op, name, change, f"wanted {wanted}", got, what) for change, got, what in bad]


OF_KV_C = "the dtype of kv_c (bfloat16) or float32, of shape "
WEIGHT = OF_KV_C + "[512], contiguous"
COS_SIN = OF_KV_C + "[max_positions, 64] with a contiguous last dimension"
POSITIONS, ENOUGH = (
    "int64 or int32 of shape [tokens]",
    "an entry for each of slot_mapping's 4 tokens",
)
FUSED_CASES = [
    *write_cases(FUSED),
    *cases(
        FUSED,
        "norm_weight",
        WEIGHT,
        (lambda t: t.half(), "float16 [512] with", "half"),
        (lambda t: t[:511], "bfloat16 [511] with", "width"),
        (lambda t: t[None], "bfloat16 [1, 512] with", "two_dims"),
        (lambda t: t[:1].expand(512), "bfloat16 [512] with strides [0]", "strided"),
    ),
    *(
        case(FUSED, "eps", always(eps), "wanted a finite number, 0 or more", got, got)
        for eps, got in ((-1e-6, "-1e-06"), (math.inf, "inf"), (math.nan, "nan"))
    ),
    *cases(
        FUSED,
        "positions",
        POSITIONS,
        (lambda t: t.short(), "int16 [4] with", "int16"),
        (lambda t: t[None], "int64 [1, 4] with", "two_dims"),
        (lambda t: t[0], "int64 [] with", "no_dims"),
    ),
    *cases(FUSED, "positions", ENOUGH, (lambda t: t[:3], "int64 [3] with", "too_few")),
    *cases(
        FUSED,
        "cos_sin_cache",
        COS_SIN,
        (lambda t: t.half(), "float16 [4, 64] with", "half"),
        (lambda t: t[:, :32], "bfloat16 [4, 32] with", "width"),
        (lambda t: t[0], "bfloat16 [64] with", "one_dim"),
        (lambda t: t.t().contiguous().t(), "bfloat16 [4, 64] with strides [1, 4]", "column_major"),
    ),
]

Q = "bfloat16 or float16 of shape [batch, s_q, heads, 576] with a contiguous last dimension"
COLUMN_MAJOR = "bfloat16 [2, 1, 3, 576] with strides [1728, 1728, 1, 3]"
INDICES, OF_Q = "int32 of shape [batch, s_q, topk]", "q's batch of 2 and s_q of 1"
LENGTHS = "int32 of shape [batch] or [batch, s_q], here [2] or [2, 1]"
SINK = "float32 of shape [heads], here [3]"
DECODE_CASES = [
    *cache_cases(DECODE, "kv_cache"),
    *layer_cases(DECODE, "kv_cache"),
    *cases(DECODE, "q", Q, (lambda t: t.float(), "float32 [2, 1, 3, 576] with", "float32")),
    *cases(DECODE, "q", Q, (lambda t: t[0], "bfloat16 [1, 3, 576] with", "three_dims")),
    *cases(DECODE, "q", Q, (lambda t: t[..., 1:], "bfloat16 [2, 1, 3, 575] with", "width")),
    *cases(DECODE, "q", Q, (lambda t: t.mT.contiguous().mT, COLUMN_MAJOR, "column_major")),
    *cases(DECODE, "indices", INDICES, (lambda t: t.long(), "int64 [2, 1, 4] with", "int64")),
    *cases(DECODE, "indices", INDICES, (lambda t: t[0], "int32 [1, 4] with", "two_dims")),
    *cases(DECODE, "indices", OF_Q, (lambda t: t[:1], "int32 [1, 1, 4] with", "batch")),
    *cases(DECODE, "indices", OF_Q, (lambda t: t.expand(2, 2, 4), "int32 [2, 2, 4] with", "s_q")),
    *cases(
        DECODE,
        "topk_length",
        LENGTHS,
        (lambda t: t.long(), "int64 [2] with", "int64"),
        (lambda t: t[:1], "int32 [1] with", "batch"),
        (lambda t: t.expand(2, 2), "int32 [2, 2] with", "s_q"),
        (lambda t: t[0], "int32 [] with", "no_dims"),
    ),
    *cases(DECODE, "attn_sink", SINK, (lambda t: t.half(), "float16 [3] with", "half")),
    *cases(DECODE, "attn_sink", SINK, (lambda t: t[:2], "float32 [2] with", "heads")),
    *cases(DECODE, "attn_sink", SINK, (lambda t: t[None], "float32 [1, 3] with", "two_dims")),
]

OUT_A = "bfloat16, float16 or float32 of shape [..., 512]"
OUT_B = "the dtype and shape of out_a (bfloat16 [2, 3, 512])"
LSE = "float32 of out_a's shape without its last dimension, [2, 3]"
BAD_LSE = [
    (lambda t: t.half(), "float16 [2, 3] with", "half"),
    (lambda t: t[:, :2], "float32 [2, 2] with", "rows"),
    (lambda t: t[..., None], "float32 [2, 3, 1] with", "dims"),
]
MERGE_CASES = [
    *cases(MERGE, "out_a", OUT_A, (lambda t: t.double(), "float64 [2, 3, 512] with", "float64")),
    *cases(MERGE, "out_a", OUT_A, (lambda t: t[..., 1:], "bfloat16 [2, 3, 511] with", "width")),
    *cases(MERGE, "out_a", OUT_A, (lambda t: t[0, 0, 0], "bfloat16 [] with", "no_dims")),
    *cases(MERGE, "out_b", OUT_B, (lambda t: t.half(), "float16 [2, 3, 512] with", "half")),
    *cases(MERGE, "out_b", OUT_B, (lambda t: t[:1], "bfloat16 [1, 3, 512] with", "rows")),
    *cases(MERGE, "out_b", OUT_B, (lambda t: t[0], "bfloat16 [3, 512] with", "dims")),
    *cases(MERGE, "lse_a", LSE, *BAD_LSE),
    *cases(MERGE, "lse_b", LSE, *BAD_LSE),
]
