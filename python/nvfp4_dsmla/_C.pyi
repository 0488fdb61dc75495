"""The records' constants, facts of this build, and the C++ codec over buffers.

Constants without a prefix are nvfp4_ds_mla's, those with FP8_ fp8_ds_mla's.

Buffers are C-contiguous objects of the buffer protocol, numpy arrays for example; sizes are numbers
of elements, the shape does not matter. A buffer of another size or element raises ValueError.
"""

from typing import Any, Literal, Protocol

from typing_extensions import Buffer

class _Array(Protocol):
    # numpy's arrays declare the buffer protocol to type checkers from Python 3.12 on only.
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

_Buffer = Buffer | _Array

NOPE_DIM: int
ROPE_DIM: int
HEAD_DIM: int
BLOCK_DIM: int
NUM_SCALES: int
RECORD_BYTES: int
CODES_OFFSET: int
ROPE_OFFSET: int
SCALES_OFFSET: int

FP8_BLOCK_DIM: int
FP8_NUM_SCALES: int
FP8_RECORD_BYTES: int
FP8_CODES_OFFSET: int
FP8_SCALES_OFFSET: int
FP8_ROPE_OFFSET: int
BF16_RECORD_BYTES: int

VERSION: str
COMPILER: str
CUDA_ARCHS: tuple[str, ...]
TORCH_TARGET: str

def scale_offset(block: int) -> int:
    """The byte of the record that holds the scale of element block 0 .. NUM_SCALES - 1."""

def encode_e2m1(x: _Buffer, out: _Buffer, /) -> None:
    """float32 [n] -> uint8 [n], one code a byte."""

def decode_e2m1(codes: _Buffer, out: _Buffer, /) -> None:
    """uint8 [n], one code a byte -> float32 [n]."""

def encode_e4m3(x: _Buffer, out: _Buffer, /) -> None:
    """float32 [n] -> uint8 [n]."""

def decode_e4m3(codes: _Buffer, out: _Buffer, /) -> None:
    """uint8 [n] -> float32 [n]."""

def encode_scales(amax: _Buffer, scale: _Buffer, inverse: _Buffer, /) -> None:
    """float32 [n], largest magnitudes -> e4m3 scales, uint8 [n], and inverses, float32 [n]."""

def widen(bits: _Buffer, dtype: Literal["bfloat16", "float16"], out: _Buffer, /) -> None:
    """uint16 [n], the bits of elements of dtype -> float32 [n]."""

def encode_tokens(
    latent: _Buffer, dtype: Literal["bfloat16", "float16", "float32"], records: _Buffer, /
) -> None:
    """[tokens * HEAD_DIM] of uint16 bits, or float32 -> uint8 [tokens * RECORD_BYTES]."""

def decode_tokens(
    records: _Buffer, dtype: Literal["bfloat16", "float16", "float32"], latent: _Buffer, /
) -> None:
    """uint8 [tokens * RECORD_BYTES] -> [tokens * HEAD_DIM] of uint16 bits, or float32."""
