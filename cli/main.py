"""The command line of amends."""

from __future__ import annotations

import click

from .version import described


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(message="amends %(version)s", version=described())
def main() -> None:
    """Let an agent's work be undone, also when the agent died halfway."""
