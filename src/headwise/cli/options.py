"""What commands share: options that are no settings of a run, and help texts that list the plug-ins."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from headwise.errors import HeadwiseError
from headwise.registry import texts
from headwise.runs.flags import settings_of
from headwise.runs.settings import Settings

Folder = Annotated[Path, typer.Argument(help="A run folder.", metavar="FOLDER")]
Out = Annotated[Path, typer.Option(help="Run folder to write; an unfinished run in it resumes.", metavar="FOLDER")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
EXAMPLES = {  # what to type where something is missing
    "run": "embedded --budget kv=25% --out runs/first",
    "probe": "embedded --out runs/first",
    "allocate": "runs/first --budget kv=20%",
    "show": "runs/first/plan.json",
    "export": "runs/first --to gguf",
    **dict.fromkeys(("reshape", "heal", "verify", "report"), "runs/first"),
}


class ShowsExamples(TyperGroup):
    """Commands that answer a missing word with an example of the whole command."""

    def invoke(self, ctx: Any) -> Any:
        """Call the command; a missing argument is reported as every other mistake is."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            example = EXAMPLES.get(error.ctx.info_name or "") if error.ctx and error.ctx.parent is ctx else None
            if error.message or error.param is None or not (example and error.ctx):  # not missing, but wrong
                raise
            name, word = error.ctx.info_name, error.param.opts[0]
            word = word if word.startswith("-") else word.upper()
            raise HeadwiseError(f"{word} is missing, as in: headwise {name} {example}") from None


class ListsPlugIns(TyperCommand):
    """A command whose help text ends with the plug-ins that its flags can name, and what each of them means."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print Typer's help text, then a panel for each kind of plug-in. Read from the plug-ins only now: it takes
        a tenth of a second.
        """
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Table

        super().format_help(ctx, formatter)
        for setting in settings_of(Settings, self.name or ""):
            if package := setting.flag.plug_ins:
                table = Table.grid(padding=(0, 2))
                examples = texts(package, "EXAMPLE")
                for name, meaning in texts(package).items():
                    table.add_row(f"[bold cyan]{name}", ": ".join(filter(None, (meaning, examples.get(name)))))
                Console().print(Panel(table, title=f"Values of {setting.written}", title_align="left", style="dim"))
