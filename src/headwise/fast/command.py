"""`headwise kernels`: which attention kernel was measured to be quickest for what, on this machine."""

import json
from typing import Annotated

import typer

from headwise.fast.table import KernelTable


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Delete all measurements; they are repeated when needed.")
    ] = False,
) -> None:
    """Show which attention kernels fast inference has measured and chosen on this machine."""
    table = KernelTable()
    if clear:
        table.clear()
    if as_json:
        typer.echo(json.dumps(table.rows, indent=1, sort_keys=True))
        return
    for key, row in sorted(table.rows.items()):
        times = ", ".join(f"{name} {ms:.3g}" for name, ms in sorted(row["ms"].items(), key=lambda item: item[1]))
        typer.echo(f"{key}: {row['path']} (ms: {times})")
    if not table.rows:
        typer.echo(f"Nothing measured yet in {table.file}: that happens when a model loaded with optimise=True runs.")
