"""`python -m meshwright`, which is also what `torchrun -m meshwright train ...` starts."""

import sys

from meshwright.cli.main import main

sys.exit(main())
