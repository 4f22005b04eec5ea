"""`python -m amends.cli` is `amends`: how a process of ours starts another one where nothing is frozen."""

from .main import main

if __name__ == "__main__":
    main(prog_name="amends")
