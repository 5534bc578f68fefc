"""`python -m quire.tools.simulate`: plays seeds; see `quire.tools.simulate.simulation`."""

import sys

from quire.tools.simulate.simulation import main

sys.exit(main())
