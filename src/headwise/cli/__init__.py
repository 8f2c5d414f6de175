"""The command line."""

from headwise.cli.commands import main as main
