"""`python -m nvfp4_dsmla`, the same as the command `nvfp4-dsmla`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line."""
    try:
        from nvfp4_dsmla.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("nvfp4_dsmla"):
            raise
        # The library itself needs torch alone.
        print(
            f"nvfp4-dsmla: the command line needs {missing.name}, which is not installed: "
            f"install the package with its extra, in a clone `pip install '.[cli]'`",
            file=sys.stderr,
        )
        sys.exit(2)
    app(prog_name="nvfp4-dsmla")


if __name__ == "__main__":
    main()
