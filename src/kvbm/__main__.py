"""``python -m kvbm`` is ``kvbm``."""

from .cli.app import main

if __name__ == "__main__":
    main(prog_name="kvbm")
