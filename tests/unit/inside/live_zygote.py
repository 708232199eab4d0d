"""Runs scenarios as processes of their own, forked after torch was imported once: a start takes milliseconds.

Reads one JSON request a line, ``{"name", "out", "config"}`` (``config`` null: without the hook) or
``{"reap": pid}``, and answers each with one number: the pid, or the exit status.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import traceback

import live_rules
import live_scenarios
import torch
import torch.utils.data.dataloader as module

from feedtune.inside import hook


def run(request: dict) -> int:
    """The scenario, as a script would run: its exit handlers included."""
    errors = os.open(request["out"] + ".err", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, null), (1, null), (2, errors)):
        os.dup2(source, target)
    code = 1
    try:
        if request["config"] is not None:
            hook.patch(module, request["config"])
        with open(request["out"], "a", buffering=1) as out:
            module_of = live_rules if hasattr(live_rules, request["name"]) else live_scenarios
            getattr(module_of, request["name"])(lambda **entry: out.write(json.dumps(entry) + "\n"), request)
            out.write('{"at": "end"}\n')
        code = 0
    except (Exception, SystemExit):  # noqa: BLE001 - printed as the interpreter does, told by the status
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    return code


def main() -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports torch's compiler: once for all
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            answer = os.waitpid(request["reap"], 0)[1]
        else:
            answer = os.fork()
            if answer == 0:
                sys.stdin.close()
                os._exit(run(request))
        print(answer, flush=True)


main()
