"""What AOTInductor needs to call the ops directly, by the libraries' C entry points.

Without it a package calls an op through a proxy and PyTorch's dispatcher, which works as well and
costs a few hundred nanoseconds more (docs/compile.md has the numbers). In C++ the entry points are
in csrc/ops/entry_points.h.
"""

from __future__ import annotations

from typing import Any

import torch

from nvfp4_dsmla.support import OPS

__all__ = ["c_shims"]

_C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "const AtenTensorHandle*",
    "int": "int64_t",
    "Optional[int]": "const int32_t*",  # a dtype
    "float": "double",
    "bool": "int32_t",
}


def c_shims() -> dict[str, Any]:
    """Options that make a package call the ops directly.

    Such a package, and a program that runs it, must find the entry points of the libraries by
    name: `import nvfp4_dsmla` sees to that, and in a program without Python
    `dlopen(path, RTLD_NOW | RTLD_GLOBAL)` of `loaded_libraries()`, before the package is loaded.

    Returns:
        for `inductor_configs` of `torch._inductor.aoti_compile_and_package`, alone or with other
        options: `{**c_shims(), "max_autotune": True}`. With `options={**c_shims(), "cpp_wrapper":
        True}` torch.compile calls them directly too.

    Source: this library's own; the option is `aot_inductor.custom_ops_to_c_shims` of PyTorch.
    """
    overloads = [getattr(torch.ops.nvfp4_dsmla, name).default for name in OPS]
    return {
        "aot_inductor.custom_ops_to_c_shims": {
            overload: [_declaration(overload._schema, device) for device in ("cpu", "cuda")]
            for overload in overloads
        }
    }


def _declaration(schema: torch.FunctionSchema, device_type: str) -> str:
    name = schema.name.removeprefix("nvfp4_dsmla::")
    arguments = [_C_TYPES[str(argument.type)] for argument in schema.arguments]
    # One for each result; an op without results gets one too.
    results = ["AtenTensorHandle*"] * max(len(schema.returns), 1)
    return f"AOTITorchError aoti_torch_{device_type}_{name}({', '.join(arguments + results)})"
