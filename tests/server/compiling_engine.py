"""An engine process that compiles for as long as QUIRE_TEST_SECONDS says, then finds that the model
is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from quire.errors import QuireError
from quire.process import life
from quire.server.link.engine_process import main


def build(*_: Any) -> NoReturn:
    # A compiler that does not watch its parent, as Triton's does not.
    child = subprocess.Popen(["sleep", "66.5"])
    Path(os.environ["QUIRE_TEST_FAULT"]).write_text(str(child.pid))
    deadline = time.monotonic() + float(os.environ["QUIRE_TEST_SECONDS"])
    while time.monotonic() < deadline:
        life.sign_of_life()
        time.sleep(0.05)
    child.kill()
    child.wait()
    raise QuireError("compiled, but the model is wrong")


if __name__ == "__main__":
    sys.exit(main(build))
