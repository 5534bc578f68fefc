"""A child that does what it is told: for the tests of `quire.process.child`."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from quire.process.child import Child, ParentLines, end_with_parent, ignore_terminal_signals


def main() -> None:
    ignore_terminal_signals()
    parent = ParentLines()
    for order in parent:
        match order:
            case "end with parent":
                end_with_parent()
            case "start another":
                parent.answer(subprocess.Popen(["sleep", "60"]).pid)
                continue
            case "have a child" | "have a busy child":
                child = Child("tests.process.obedient_child", leads_group=True)
                child.ask("end with parent")
                parent.answer([child.pid, child.ask("start another")])
                if order == "have a busy child":
                    child.connection.sendall(b'"hang"\n')
                continue
            case "print":
                print("for nobody's eyes", flush=True)
            case "write much":
                os.write(2, b"x" * 5_000_000 + b" at last")
            case "exit":
                sys.exit("no more to say")
            case "hang":
                time.sleep(60)
        parent.answer(order)


if __name__ == "__main__":
    main()
