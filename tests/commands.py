"""The command line, run as a person would and read back."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from nvfp4_dsmla.cli.app import app


def run(*arguments: str, status: int = 0) -> str:
    """What it prints, to stderr if the status is 2."""
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.stdout if status != 2 else done.stderr


def report_of(*arguments: str, status: int = 0) -> dict[str, Any]:
    report = json.loads(run(*arguments, "--json", status=status))
    assert isinstance(report, dict)
    return report
