"""``python -m primal_attention.cli`` is ``primal``."""

import sys

from primal_attention.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
