"""`python -m quire.simulate`: plays seeds; see `quire.simulate.simulation`."""

import sys

from quire.simulate.simulation import main

sys.exit(main())
