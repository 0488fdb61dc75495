"""The command line: `nvfp4-dsmla`, or `python -m nvfp4_dsmla`.

Each command gathers a report, a plain dict that `--json` prints, and draws it as a screen. The
modules of this folder know rich, typer and matplotlib, which the library does not need.
"""

from __future__ import annotations
