"""The pass as Inductor knows it, and its place in Inductor's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from nvfp4_dsmla.inductor.rewrite import Counts, fuse_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    GraphPass: TypeAlias = Callable[[fx.Graph], None]

SOURCES = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))

_counts = Counts(0, 0)


class FusionPass(CustomGraphPass):
    """Runs other passes, then fuses the writes of a graph.

    For who sets `torch._inductor.config.joint_custom_pre_pass` himself; `enable_fusion` does it for
    all others. It may be called on any graph of ATen ops whose nodes know their fake tensors,
    functionalized or not: what Inductor has before its own passes, what make_fx or torch.export
    give.

    Args:
        after: what runs before it: None, a pass, or several.
    """

    def __init__(self, after: GraphPass | Sequence[GraphPass] | None = None) -> None:
        self.after = after

    def __call__(self, graph: fx.Graph) -> None:
        """Changes a graph in place."""
        global _counts
        for user_pass in self._passes():
            user_pass(graph)
        found = fuse_writes(graph)
        _counts = Counts(_counts.writes + found.writes, _counts.fused + found.fused)

    def uuid(self) -> object | None:
        """What Inductor's caches know the pass by: its source, and the passes before it.

        None, which turns the caches off, if one of these has no uuid.
        """
        uuids = [getattr(user_pass, "uuid", lambda: None)() for user_pass in self._passes()]
        return None if None in uuids else (get_hash_for_files(SOURCES), *uuids)

    def _passes(self) -> Sequence[GraphPass]:
        if self.after is None:
            return ()
        return (self.after,) if callable(self.after) else self.after


def enable_fusion() -> None:
    """Fuses norm, rotation and write in all that torch.compile or AOTInductor compiles from now on.

    Takes the place of the pass in `torch._inductor.config.joint_custom_pre_pass`, and runs it
    first. Does nothing if it is on already. What has been compiled before stays as it is.
    """
    if not isinstance(config.joint_custom_pre_pass, FusionPass):
        config.joint_custom_pre_pass = FusionPass(after=config.joint_custom_pre_pass)


def disable_fusion() -> None:
    """Puts back the pass that was there before `enable_fusion`; does nothing if fusion is off."""
    if isinstance(config.joint_custom_pre_pass, FusionPass):
        config.joint_custom_pre_pass = config.joint_custom_pre_pass.after  # type: ignore[assignment]


def fusion_counts() -> Counts:
    """The writes found in this process so far, and how many were fused, over all graphs compiled.

    A graph that Inductor takes from a cache is not compiled, and counts for neither.
    """
    return _counts
