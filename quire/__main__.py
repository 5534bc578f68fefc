"""`python -m quire` is the `quire` command, for where it is not installed."""

from quire.cli.main import main

main()
