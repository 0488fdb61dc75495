"""Whether this build serves a combination of op, device and sizes, and if not, why.

Nothing here is a list of wishes. What a device can run is read from the libraries that are loaded
and the architectures that are compiled into them; whether an op takes a head size, a dtype, a block
size or a number of heads is asked of the op itself, by a call on empty tensors, so a reason is the
text that the op raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from nvfp4_dsmla import _C
from nvfp4_dsmla._load import loaded_libraries
from nvfp4_dsmla.formats import CacheFormat, canonicalize_kv_cache_dtype, get_cache_format
from nvfp4_dsmla.layout import HEAD_DIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["OPS", "supports_combination"]


@dataclass(frozen=True)
class _Question:
    """What is asked of an op; the defaults suit every op."""

    cache_format: CacheFormat
    head_size: int = HEAD_DIM
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 64
    num_heads: int = 128
    has_sink: bool = False

    def empty_cache(self) -> Tensor:
        shape = (0, self.block_size, self.cache_format.elements_per_token)
        return torch.empty(shape, dtype=self.cache_format.storage_dtype)

    def empty_latents(self) -> tuple[Tensor, Tensor]:
        rope_dim = self.cache_format.rope_dim
        widths = (max(self.head_size - rope_dim, 0), rope_dim)
        kv_c, k_pe = (torch.empty(0, width, dtype=self.dtype) for width in widths)
        return kv_c, k_pe


def _no_index(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)


def _write(op: torch._ops.OpOverload, asked: _Question) -> None:
    op(*asked.empty_latents(), asked.empty_cache(), _no_index(0))


def _fused_write(op: torch._ops.OpOverload, asked: _Question) -> None:
    weight = torch.empty(asked.cache_format.nope_dim)
    cos_sin = torch.empty(0, asked.cache_format.rope_dim)
    none = _no_index(0)
    op(*asked.empty_latents(), weight, 0.0, none, cos_sin, True, asked.empty_cache(), none)


def _cp_gather(op: torch._ops.OpOverload, asked: _Question) -> None:
    dst = torch.empty(0, asked.head_size, dtype=asked.dtype)
    op(asked.empty_cache(), dst, _no_index(0, 0), _no_index(0), 0)


def _gather(op: torch._ops.OpOverload, asked: _Question) -> None:
    op(asked.empty_cache(), _no_index(0), asked.dtype)


def _convert(op: torch._ops.OpOverload, asked: _Question) -> None:
    """To bfloat16, or from it."""
    of_bfloat16 = replace(asked, cache_format=get_cache_format("bfloat16"))
    quantised = asked if asked.cache_format.is_quantized else _Question(get_cache_format("fp8"))
    quantised = replace(quantised, block_size=asked.block_size)
    op(quantised.empty_cache(), of_bfloat16.empty_cache())


def _decode(op: torch._ops.OpOverload, asked: _Question) -> None:
    q = torch.empty(0, 1, asked.num_heads, asked.head_size, dtype=asked.dtype)
    sink = torch.empty(asked.num_heads) if asked.has_sink else None
    op(q, asked.empty_cache(), _no_index(0, 1, 0), 1.0, None, sink)


def _merge(op: torch._ops.OpOverload, asked: _Question) -> None:
    out = torch.empty(0, 1, asked.num_heads, asked.cache_format.nope_dim, dtype=asked.dtype)
    op(out, out.new_empty(out.shape[:-1], dtype=torch.float32), out, out[..., 0].float())


@dataclass(frozen=True)
class _Op:
    """An op, the format it is for, and a call of it that does nothing but check."""

    format_name: str | None  # None: it has no cache among its arguments
    probe: Callable[[torch._ops.OpOverload, _Question], None]
    serves: bool  # whether an engine that reads and writes such a cache needs it
    takes_head_size: bool = True
    is_sparse: bool = False
    first_capability: tuple[int, int] = (0, 0)  # its CUDA code for older targets is empty


_OPS: dict[str, _Op] = {
    "concat_and_cache_nvfp4_ds_mla": _Op("nvfp4_ds_mla", _write, serves=True),
    # An engine may normalise and rotate before it writes.
    "fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla": _Op(
        "nvfp4_ds_mla", _fused_write, serves=False
    ),
    "concat_and_cache_fp8_ds_mla": _Op("fp8_ds_mla", _write, serves=True),
    "concat_and_cache_bfloat16": _Op("bfloat16", _write, serves=True),
    "cp_gather_and_upconvert_nvfp4_kv_cache": _Op("nvfp4_ds_mla", _cp_gather, serves=True),
    "gather_and_upconvert_nvfp4_ds_mla": _Op(
        "nvfp4_ds_mla", _gather, serves=True, takes_head_size=False
    ),
    "cp_gather_and_upconvert_fp8_kv_cache": _Op("fp8_ds_mla", _cp_gather, serves=True),
    "gather_and_upconvert_fp8_ds_mla": _Op(
        "fp8_ds_mla", _gather, serves=True, takes_head_size=False
    ),
    "convert_kv_cache": _Op(None, _convert, serves=False, takes_head_size=False),
    "sparse_mla_decode": _Op(
        "nvfp4_ds_mla", _decode, serves=True, is_sparse=True, first_capability=(8, 0)
    ),
    # Only context parallelism needs it.
    "merge_attention_states": _Op(None, _merge, serves=False, takes_head_size=False),
}

OPS: dict[str, str | None] = {name: op.format_name for name, op in _OPS.items()}
"""The ops by their names in torch.ops.nvfp4_dsmla, each with the format it is for; None: any."""


def supports_combination(
    *,
    op: str | None = None,
    kv_cache_dtype: str = "nvfp4_ds_mla",
    device_type: str = "cuda",
    compute_capability: tuple[int, int] | None = None,
    head_size: int | None = None,
    dtype: torch.dtype | None = None,
    block_size: int | None = None,
    num_heads: int | None = None,
    has_sink: bool = False,
    use_sparse: bool = True,
) -> str | None:
    """None if this build serves the combination, else a sentence that says why not.

    What is None is not asked about.

    Args:
        op: a name in torch.ops.nvfp4_dsmla; None for every op that serving such a cache needs.
        kv_cache_dtype: what `canonicalize_kv_cache_dtype` takes.
        device_type: as torch.device names it.
        compute_capability: of a CUDA device, (9, 0) for an H200. None for that of the current
            device, which must then be there.
        head_size: elements of a token, NoPE and RoPE.
        dtype: of the latents that are written, of the rows that are gathered, of q.
        block_size: tokens a block.
        num_heads: query heads a rank.
        has_sink: whether attention has a sink.
        use_sparse: whether attention reads only selected tokens.

    Raises:
        ValueError: `op` or `kv_cache_dtype` is unknown.

    Source: what an engine's attention backend answers under the same name; it asks with the same
    facts.
    """
    format_name = canonicalize_kv_cache_dtype(kv_cache_dtype)
    if op is not None and op not in _OPS:
        raise ValueError(f"op: wanted one of {', '.join(OPS)}, got {op!r}")
    names = [op] if op is not None else _needed_by(format_name)
    given = {
        "head_size": head_size,
        "dtype": dtype,
        "block_size": block_size,
        "num_heads": num_heads,
    }
    asked = _Question(
        cache_format=get_cache_format(format_name),
        has_sink=has_sink,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    for name in names:
        reason = _why_not_on(name, device_type, compute_capability) or _why_not(
            name, asked, use_sparse
        )
        if reason is not None:
            return reason
    return None


def _needed_by(format_name: str) -> list[str]:
    """Its write, its gathers, and attention, which other formats lack: their reason is the op's."""
    return [
        name
        for name, op in _OPS.items()
        if op.serves and (op.format_name == format_name or op.is_sparse)
    ]


def _why_not_on(op: str, device_type: str, capability: tuple[int, int] | None) -> str | None:
    """Why the op has no kernel for a device; None if it has one."""
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return f"{op}: wanted a device of type cpu or cuda, got {device_type}"
    if torch.version.cuda is None:
        return f"{op}: wanted a torch with CUDA, got {torch.__version__}, built without it"
    if len(loaded_libraries()) < 2:
        return no_cuda_library(op)
    if not _has_cuda_kernel(op):
        return f"{op}: wanted a kernel for CUDA, got an op that has one for the CPU alone"
    if capability is None:
        if not torch.cuda.is_available():
            return f"{op}: wanted a CUDA device, got a machine on which torch sees none"
        capability = torch.cuda.get_device_capability()
    if any(_runs_on(target, capability, _OPS[op].first_capability) for target in _C.CUDA_ARCHS):
        return None
    archs = ", ".join(_C.CUDA_ARCHS)
    return (
        f"{op}: wanted a GPU that this build has the op's code for ({archs}), "
        f"got compute capability {capability[0]}.{capability[1]}"
    )


def _has_cuda_kernel(op: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"nvfp4_dsmla::{op}", "CUDA")


def no_cuda_library(op: str) -> str:
    """What an op says of a CUDA tensor where only the CPU library was built."""
    return (
        f"{op}: wanted the CUDA library, got a build without it: nvcc was not found when "
        f"nvfp4_dsmla {_C.VERSION} was compiled, or NVFP4_DSMLA_CUDA was OFF"
    )


def explain_missing_cuda() -> None:
    """Makes the ops say why they do not take CUDA tensors, where only the CPU library was built.

    PyTorch's own message lists thirty backends and not the reason.
    """
    if torch.version.cuda is None or len(loaded_libraries()) > 1:
        return
    for op in OPS:
        torch.library.impl(f"nvfp4_dsmla::{op}", "CUDA", partial(_refuse_cuda, op))


def _refuse_cuda(op: str, *_args: object, **_kwargs: object) -> None:
    raise NotImplementedError(no_cuda_library(op))


def _runs_on(target: str, capability: tuple[int, int], first: tuple[int, int]) -> bool:
    """Whether a GPU runs the code for a target in NVIDIA's names: sm_90a, sm_100f, compute_100.

    Code for a target older than `first` has the kernel in it, but an empty one.
    """
    kind, number, suffix = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", target).groups()  # type: ignore[union-attr]
    built_for = divmod(int(number), 10)
    if built_for < first:
        return False
    if suffix == "a":  # that chip's own instructions
        return capability == built_for
    if kind == "compute" and not suffix:  # PTX, compiled by the driver for any later chip
        return capability >= built_for
    return capability[0] == built_for[0] and capability >= built_for


def _why_not(op: str, asked: _Question, use_sparse: bool) -> str | None:
    """Why the op would refuse its arguments; None if it would not."""
    about = _OPS[op]
    if about.format_name not in (None, asked.cache_format.name):
        return (
            f"{op}: wanted kv_cache_dtype {about.format_name}, the format it is for, "
            f"got {asked.cache_format.name}"
        )
    if about.is_sparse and not use_sparse:
        return f"{op}: wanted sparse attention, over the tokens that its indices name, got dense"
    if not about.takes_head_size and asked.head_size != HEAD_DIM:
        return f"{op}: wanted head_size {HEAD_DIM}, the dims of a record, got {asked.head_size}"
    try:
        about.probe(getattr(torch.ops.nvfp4_dsmla, op).default, asked)
    except ValueError as refusal:
        # What follows the shape describes the empty tensor of the call, not the combination.
        return re.sub(r" with strides \[[\d, ]*\] on cpu$", "", str(refusal))
    return None
