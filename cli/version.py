"""Which amends this is, answered before anything heavy is imported.

One number, read here by the wheel, the command line and the frozen executable. A frozen build lays `build.txt`
beside this file with the commit it was built from. No importlib.metadata: it costs more than the whole answer.
"""

import os

VERSION = "0.1.0"


def described() -> str:
    """The version, and the commit where this is a frozen build: `0.1.0 (b84ce6ecd5ea)`."""
    note = os.path.join(os.path.dirname(__file__), "build.txt")
    if not os.path.exists(note):
        return VERSION
    with open(note, encoding="ascii") as file:
        return f"{VERSION} ({file.read().strip()})"
