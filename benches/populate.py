"""Seconds that populating and pinning memory takes alone, beside what a join waits for it (`fresh_memory.py`).

    python benches/populate.py --bytes 1.1e9 2.7e9

As the server does it: threads make the pages of a range present, in huge pages where the system has them, and the
driver then registers the range for GPUs at once. Measured for each kind of memory that a server's arena may consist
of. A tmpfs with huge pages is mounted for that, which takes the capability CAP_SYS_ADMIN. Without it, or without a GPU,
what cannot be measured is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from common import Recorder, median

HUGE_PAGE = 2 << 20

# Of Linux: advice to use huge pages, and to make pages present as if each were written.
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23

# Of the driver: registered for the contexts of all GPUs.
PORTABLE = 1

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Driver:
    """The CUDA driver, with the context of the first GPU."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._check(self._cuda.cuInit(0))
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self._check(self._cuda.cuCtxSetCurrent(context))

    def pin(self, start: int, size: int) -> None:
        self._check(self._cuda.cuMemHostRegister_v2(ctypes.c_void_p(start), ctypes.c_size_t(size), PORTABLE))

    def unpin(self, start: int) -> None:
        self._check(self._cuda.cuMemHostUnregister(ctypes.c_void_p(start)))

    def _check(self, code: int) -> None:
        if code:
            raise OSError(f"the CUDA driver answers {code}")


def driver() -> Driver | None:
    """The driver, where there is a GPU."""
    with contextlib.suppress(OSError):
        return Driver()
    return None


def populate(start: int, size: int, threads: int) -> None:
    """Makes all pages present, by threads."""
    part = -(-size // threads // HUGE_PAGE) * HUGE_PAGE
    failed: list[int] = []

    def work(at: int) -> None:
        if libc.madvise(start + at, min(part, size - at), MADV_POPULATE_WRITE):
            failed.append(ctypes.get_errno())

    workers = [threading.Thread(target=work, args=(at,)) for at in range(0, size, part)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise OSError(failed[0], os.strerror(failed[0]))


def seconds_of(size: int, file: int | None, threads: int, gpu: Driver | None) -> tuple[float, float]:
    """Seconds to populate, and to pin, a new range of the file's memory, or of anonymous memory."""
    size = -(-size // HUGE_PAGE) * HUGE_PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    since = time.perf_counter()
    taken = libc.mmap(None, size + HUGE_PAGE, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    start = -(-taken // HUGE_PAGE) * HUGE_PAGE
    if file is not None:
        os.ftruncate(file, 0)
        os.ftruncate(file, size)
        fixed = 0x10
        libc.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, file, 0)
    libc.madvise(start, size, MADV_HUGEPAGE)
    populate(start, size, threads)
    populated = time.perf_counter()
    if gpu:
        gpu.pin(start, size)
    pinned = time.perf_counter()
    if gpu:
        gpu.unpin(start)
    libc.munmap(taken, size + HUGE_PAGE)
    return populated - since, pinned - populated


def backings(folder: Path) -> Iterator[tuple[str, int | None]]:
    """Each kind of memory, with its file if it has one."""
    yield "anonymous", None
    yield "memfd", os.memfd_create("populate")
    if not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "huge=always", "populate", str(folder)], capture_output=True
    ).returncode:
        yield "tmpfs of huge pages", os.open(folder / "file", os.O_RDWR | os.O_CREAT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, nargs="+", default=[1.1e9, 2.7e9])
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    recorder = Recorder("fresh_memory")
    gpu = driver()
    with tempfile.TemporaryDirectory() as name:
        try:
            for backing, file in backings(Path(name)):
                for size in map(int, options.bytes):
                    runs = [seconds_of(size, file, options.threads, gpu) for _ in range(options.runs)]
                    populating, pinning = (median([run[at] for run in runs]) for at in range(2))
                    recorder.write(
                        benchmark="populate",
                        backing=backing,
                        bytes=size,
                        threads=options.threads,
                        populate_seconds=populating,
                        pin_seconds=pinning if gpu else None,
                        seconds=[sum(run) for run in runs],
                    )
                    pinned = f", pinned in {pinning * 1e3:.0f}" if gpu else ""
                    print(f"{backing}, {size / 1e9:.1f} GB: populated in {populating * 1e3:.0f} ms{pinned}", flush=True)
                if file is not None:
                    os.close(file)
        finally:
            subprocess.run(["umount", name], capture_output=True)


if __name__ == "__main__":
    main()
