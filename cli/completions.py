"""`amends completions SHELL` prints what a shell needs to complete verbs, options and the ids of sagas.

The script asks `amends` itself at each TAB, so it stays right after an upgrade.
"""

from __future__ import annotations

import click

from . import ui

SHELLS = ("bash", "zsh", "fish")


@click.command(cls=ui.Verb, name="completions")
@click.argument("shell", type=click.Choice(SHELLS))
def completions(shell: str) -> None:
    """Print the completion script of a shell.

    bash: eval "$(amends completions bash)" in ~/.bashrc; zsh the same in ~/.zshrc; fish: amends completions fish >
    ~/.config/fish/completions/amends.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    # The script is filled in without `source()`, which would start the shell to ask for its version.
    script = made.source_template % made(click.get_current_context().find_root().command, {}, "amends",
                                         "_AMENDS_COMPLETE").source_vars()  # fmt: skip
    if ui.session().as_json:
        ui.emit({"shell": shell, "script": script})
    else:
        ui.put(script)
