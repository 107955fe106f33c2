"""``python -m primal_attention.bench``: the same as ``primal bench``."""

import sys

from primal_attention.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
