"""A seccomp filter: system calls that no program of a box needs, and that have been the way out of boxes before.

They fail with EPERM; a program of another architecture's calls is killed. A list of what is
refused rather than of what is allowed: model- written code may be any program. It is the second
wall, behind namespaces and a user without capabilities.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from rondel.runtime.sandbox.inside.kernel import ARCH, SECCOMP, prctl

#        name               x86_64 aarch64
TABLE = """ptrace              101 117
process_vm_readv               310 270
process_vm_writev              311 271
process_madvise                440 440
pidfd_getfd                    438 438
kcmp                           312 272
mount                          165  40
umount2                        166  39
pivot_root                     155  41
chroot                         161  51
move_mount                     429 429
open_tree                      428 428
fsopen                         430 430
fsconfig                       431 431
fsmount                        432 432
fspick                         433 433
mount_setattr                  442 442
unshare                        272  97
setns                          308 268
mknod                          133   -
mknodat                        259  33
bpf                            321 280
perf_event_open                298 241
userfaultfd                    323 282
io_uring_setup                 425 425
io_uring_enter                 426 426
io_uring_register              427 427
add_key                        248 217
request_key                    249 218
keyctl                         250 219
name_to_handle_at              303 264
open_by_handle_at              304 265
init_module                    175 105
finit_module                   313 273
delete_module                  176 106
kexec_load                     246 104
kexec_file_load                320 294
reboot                         169 142
swapon                         167 224
swapoff                        168 225
acct                           163  89
quotactl                       179  60
syslog                         103 116
settimeofday                   164 170
clock_settime                  227 112
clock_adjtime                  305 266
adjtimex                       159 171
sethostname                    170 161
setdomainname                  171 162
iopl                           172   -
ioperm                         173   -
shmget                          29 194
semget                          64 190
msgget                          68 186
mq_open                        240 180
fanotify_init                  300 262
lookup_dcookie                 212  18
"""
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "x86_64": {"clone": 56, "clone3": 435, "socket": 41, "socketpair": 53, "memfd_create": 319, "memfd_secret": 447},
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "socket": 198,
        "socketpair": 199,
        "memfd_create": 279,
        "memfd_secret": 447,
    },
}
NAMESPACES = 0x7E020000 | 0x80  # every CLONE_NEW* flag
# unix, inet, inet6: no netlink, no packets, no way to the machine that this one may be a guest of (vsock)
FAMILIES = (1, 2, 10)
LOAD, EQUAL, ANY, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(*, memory_files: bool) -> bytes:
    """The filter as the kernel reads it: 8 bytes an instruction (code, jump if true, jump if false, constant).

    memory_files: whether files in memory may be made, which only a control group counts.
    """
    column = 1 if ARCH == "x86_64" else 2
    number = NUMBERS[ARCH]
    refused = [int(row.split()[column]) for row in TABLE.splitlines() if row.split()[column] != "-"]
    refused += [] if memory_files else [number["memfd_create"], number["memfd_secret"]]

    def pack_instruction(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, k)

    eperm, enosys = pack_instruction(RETURN, FAIL | errno.EPERM), pack_instruction(RETURN, FAIL | errno.ENOSYS)
    lines = [
        pack_instruction(LOAD, 4),
        pack_instruction(EQUAL, AUDIT[ARCH], 1, 0),
        pack_instruction(RETURN, KILL),
        pack_instruction(LOAD, 0),
    ]
    if ARCH == "x86_64":
        lines += [
            pack_instruction(AT_LEAST, 0x40000000, 0, 1),
            pack_instruction(RETURN, KILL),
        ]  # the x32 calls, each a second name
    for one in refused:
        lines += [pack_instruction(EQUAL, one, 0, 1), eperm]
    # its flags lie in memory where a filter cannot look; libc then uses clone
    lines += [pack_instruction(EQUAL, number["clone3"], 0, 1), enosys]
    lines += [
        pack_instruction(EQUAL, number["clone"], 0, 4),
        pack_instruction(LOAD, 16),
        pack_instruction(ANY, NAMESPACES, 0, 1),
        eperm,
        pack_instruction(RETURN, ALLOW),
    ]
    for family in ("socket", "socketpair"):
        lines += [pack_instruction(EQUAL, number[family], 0, 3 + len(FAMILIES)), pack_instruction(LOAD, 16)]
        lines += [pack_instruction(EQUAL, known, len(FAMILIES) - i, 0) for i, known in enumerate(FAMILIES)]
        lines += [eperm, pack_instruction(RETURN, ALLOW)]
    return b"".join([*lines, pack_instruction(RETURN, ALLOW)])


def is_supported() -> bool:
    return ARCH in AUDIT


def install_filter(*, memory_files: bool) -> None:
    """For this process and all that come of it. Needs no_new_privs."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    code = filter_program(memory_files=memory_files)
    wanted = Program(len(code) // 8, code)
    prctl(SECCOMP, 2, ctypes.addressof(wanted))
