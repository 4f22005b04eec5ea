"""What the frozen executable runs first: it cleans the environment for its children, and answers --version at once.

The loader points LD_LIBRARY_PATH at our own libraries and marks its own folder in _PYI_* variables. A child that
inherited the first would load our libcrypto; an amends that inherited the second would take a folder that is
deleted under it for its own.
"""

import os
import sys

theirs = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
os.environ.pop("LD_LIBRARY_PATH", None)
if theirs:
    os.environ["LD_LIBRARY_PATH"] = theirs
for name in [name for name in os.environ if name.startswith("_PYI_")]:
    del os.environ[name]

if sys.argv[1:] == ["--version"]:
    from amends.cli.version import described

    sys.stdout.write(f"amends {described()}\n")
else:
    from amends.cli.main import main

    main(prog_name="amends")
