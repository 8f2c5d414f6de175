"""The command line."""

from headwise.cli.commands import app as app
from headwise.cli.commands import main as main
