"""The commands, their options and their exit statuses.

0 for success, 1 for a verification that failed, 2 for arguments that cannot be served.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvfp4_dsmla.cli import bench as bench_entry
from nvfp4_dsmla.cli import info as info_screen
from nvfp4_dsmla.cli import inspection as inspect_screen
from nvfp4_dsmla.cli import plan as plan_screen
from nvfp4_dsmla.cli import verify as verify_screen
from nvfp4_dsmla.cli.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Iterator

app = typer.Typer(
    help="The 4-bit latent cache nvfp4_ds_mla: what is installed, whether it is right, what fits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@contextmanager
def _refusals() -> Iterator[None]:
    """A refused argument ends the command with its sentence and status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"nvfp4-dsmla: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def info(json: Json = False) -> None:
    """Show versions, loaded libraries, devices, and which op runs where and why not."""
    Screen(as_json=json).show(info_screen.gather(), info_screen.draw)


@app.command()
def verify(
    tokens: Annotated[int, typer.Option(min=1, help="Random tokens a check.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; by default every one present.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare what the ops of every device make of golden and random records with the reference."""
    screen = Screen(as_json=json)
    with _refusals():
        report = verify_screen.gather(screen, tokens=tokens, seed=seed, device=device)
    screen.show(report, verify_screen.draw)
    if not report["passed"]:
        raise typer.Exit(1)


@app.command()
def plan(
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(plan_screen.MODELS)}.")
    ] = "deepseek-v3.2",
    memory: Annotated[str, typer.Option(help="A GPU's memory for the cache.")] = "60GiB",
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 64,
    layers: Annotated[int | None, typer.Option(help="In place of the model's.")] = None,
    indexer_layers: Annotated[int | None, typer.Option(help="In place of the model's.")] = None,
    indexer_bytes: Annotated[
        int | None, typer.Option(help="A token and layer, in place of the model's.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="GPUs that share the tokens out.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw the bars into this PNG.")] = None,
    json: Json = False,
) -> None:
    """Show how many tokens a memory budget holds in each format."""
    with _refusals():
        report = plan_screen.gather(
            model=model,
            memory=plan_screen.parse_bytes(memory),
            block_size=block_size,
            layers=layers,
            indexer_layers=indexer_layers,
            indexer_bytes=indexer_bytes,
            ranks=ranks,
        )
    Screen(as_json=json).show(report, plan_screen.draw)
    if plot is not None:
        with _refusals():
            plan_screen.plot(report, plot)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A cache: .npy, or of torch.save.")],
    key: Annotated[str | None, typer.Option(help="Which tensor of a saved dict.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="A file with the latents that were written.")
    ] = None,
    against_key: Annotated[str | None, typer.Option(help="Which tensor of that.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the scales into this PNG.")] = None,
    json: Json = False,
) -> None:
    """Show what the records of a saved cache hold: scales, clipped and tiny blocks, NaN, error."""
    screen = Screen(as_json=json)
    with _refusals():
        report = inspect_screen.gather(
            screen, file, key=key, against=against, against_key=against_key
        )
    screen.show(report, inspect_screen.draw)
    if plot is not None:
        with _refusals():
            inspect_screen.plot(report, plot)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Run the benchmarks of a checkout; arguments go to them (`bench --help` shows theirs)."""
    with _refusals():
        status = bench_entry.run(context.args)
    raise typer.Exit(status)
