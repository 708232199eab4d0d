"""Writes its PID and every signal that it is told to catch to stdout; ends as it is told.

Arguments: names of signals to catch. ``EXIT`` is its exit code after the last of them has come (each once).
"""

import os
import signal
import sys
import time


def caught(number, _):
    print(signal.Signals(number).name, flush=True)
    waiting.discard(signal.Signals(number).name)


waiting = set(sys.argv[1:])
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), caught)
print(os.getpid(), flush=True)
while waiting or not sys.argv[1:]:
    time.sleep(0.01)
time.sleep(0.3)  # for one that would come twice
sys.exit(int(os.environ.get("EXIT", "0")))
