"""What the library's speed is measured with: `python -m benchmarks --help`, from a checkout.

`cache` times the write and the gathers, `decode` the attention, `host` what a call costs before any
work is done, `cpu` the CPU's kernels on one thread and on all. Each compares with its baselines in
the same run.
"""

from __future__ import annotations
