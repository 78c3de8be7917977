"""Find and end the processes of one server, and no others.

The ranks that torchrun starts lead sessions of their own and may lose their parent, so neither a process group
nor a tree of children holds them all. Every process instead inherits one environment variable with a token that
only this server has.
"""

from __future__ import annotations

import psutil

VARIABLE = "LLAMA_SERVER_TOKEN"


def marked(token: str) -> list[psutil.Process]:
    """All living processes that carry `token` in their environment, the oldest first."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(VARIABLE) == token:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def end(token: str, *, grace: float = 15.0) -> int:
    """End every process that carries `token`; returns how many there were.

    The oldest one (the frontend) is asked first and takes the others with it; what is left after `grace` seconds
    is killed. Returns only when all are gone.
    """
    processes = marked(token)
    for process in processes[:1]:
        _signal(process, kill=False)
    psutil.wait_procs(processes, timeout=grace)
    while left := marked(token):
        for process in left:
            _signal(process, kill=True)
        psutil.wait_procs(left, timeout=5)
    return len(processes)


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            process.kill()
        else:
            process.terminate()
    except psutil.NoSuchProcess:
        pass
