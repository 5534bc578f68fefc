"""An engine process that hangs before it has said a word."""

import time

time.sleep(60)
