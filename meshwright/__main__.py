"""The entry point of `python -m meshwright` and of `torchrun -m meshwright train ...`."""

import sys

from meshwright.cli.main import main

sys.exit(main())
