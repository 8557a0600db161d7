"""Run a program that runs code which nobody has read: no network, no privileges, no files but its own, limits.

    python confined.py SCRATCH SECONDS MEMORY_BYTES PROGRAM ARGUMENTS…

Linux only, by what the kernel offers to every user: user, network, process and IPC namespaces (no capabilities, no
network device, no process but its own in sight of a signal, and all of them gone when it ends), Landlock (writing in
SCRATCH and /dev/shm alone) and resource limits. It can still read what its user can read. Standard library only: it
runs before anything is imported. Exit code 97: this system refuses to confine it, and nothing was run.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys

REFUSED = 97
_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000  # user, network, process, IPC
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
_NO_NEW_PRIVILEGES = 38
_END_WITH_PARENT = 1
_WRITING = 0b1111111110010  # Landlock's rights to write, remove and make files of any kind, of its first version
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # added by versions 2 and 3
_PATH_BENEATH = 1
_libc = ctypes.CDLL(None, use_errno=True)


def confine(scratch: str, seconds: int, memory: int) -> None:
    """Give up, for this process and all that it starts, what the program does not need. OSError: not possible here."""
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    _checked(_libc.unshare(_NAMESPACES), "unshare")
    _write_only_in([scratch, "/dev/shm", "/dev/null"])
    for limit, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 1 << 28),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 512),
    ):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def _write_only_in(places: list[str]) -> None:
    version = _checked(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock")
    rights = _WRITING | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("Q", rights)
    rules = _checked(_libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock")
    for place in places:
        folder = os.open(place, os.O_PATH | os.O_CLOEXEC)
        allowed = rights if os.path.isdir(place) else rights & (0b10 | _TRUNCATE)
        rule = struct.pack("=Qi", allowed, folder)
        _checked(_libc.syscall(_LANDLOCK_ADD, rules, _PATH_BENEATH, rule, 0), "landlock")
        os.close(folder)
    _checked(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def main() -> int:
    scratch, seconds, memory, *program = sys.argv[1:]
    try:
        confine(scratch, int(seconds), int(memory))
    except (OSError, AttributeError) as error:
        print(f"cannot confine it: {error}", file=sys.stderr)
        return REFUSED
    _libc.prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)  # whoever asked may be killed
    child = os.fork()  # the first process of the new namespace: when it ends, all that it started end
    if child == 0:
        _libc.prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        os.chdir(scratch)
        os.execv(program[0], program)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
