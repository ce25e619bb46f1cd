"""Starts `ps` calls as forked processes of one that has torch loaded: real processes, without 5 s of imports each.

Protocol, one request at a time: a JSON line {argv, env, cwd, stdout, stderr} in; a line with the child's pid out, and
when it has ended a line with its exit code (negative: the signal that killed it).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def child(request: dict[str, Any]) -> int:
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number, path in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        file = os.open(path, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["pscli", *request["argv"]]
    if "script" in request:  # a test's own main, run where pscli would be
        exec(compile(request["script"], "script.py", "exec"), {"__name__": "__main__"})
        return 0
    from pscli.main import call

    return call(request["argv"])


def main() -> None:
    import parallel_synthesis.training.replay
    import parallel_synthesis.training.resume  # noqa: F401 - torch, transformers and peft with it

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = child(request)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except BaseException:  # noqa: BLE001 - the child must not return into the server's loop
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
