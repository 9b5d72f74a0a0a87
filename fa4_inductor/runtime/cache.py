"""Compiled kernels in memory and on disk: one compile per key, across threads and processes.

An entry is a directory named by the key's digest with the artefact and, written last, a `meta.json` with its checksum.
Entries are published by renaming a finished directory, so a reader sees a whole entry or none. Whatever is wrong with
the disk (read-only, full, foreign, corrupt) costs a compile and at most one warning, never the user's program.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from fa4_inductor import log

T = TypeVar("T")
ARTEFACT = "kernel.o"
META = "meta.json"
_FORMAT = 1
# A kernel compiles in seconds; a lock held longer belongs to a stopped process, and a second compile beats waiting.
_LOCK_TIMEOUT_S = 300.0
_LOCK_POLL_S = 0.05
_log = log.get_logger(__name__)


class KernelCache(Generic[T]):
    """Maps a digest to a loaded kernel of type T.

    Args:
        root: directory of the disk cache, created with mode 0700; None keeps kernels in memory only.
        load: reads a kernel back from its artefact file. May raise anything: the entry is then compiled anew.
        save: writes a kernel's artefact file. May raise anything: the kernel then stays in memory only.
    """

    def __init__(self, root: Path | None, load: Callable[[Path], T], save: Callable[[T, Path], None]) -> None:
        self._root = root
        self._load = load
        self._save = save
        self._memory: dict[str, T] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def get(self, digest: str, describe: Mapping[str, Any], compile_kernel: Callable[[], T]) -> T:
        """The kernel of `digest`: from memory, else disk, else `compile_kernel`, whose errors pass through."""
        kernel = self._memory.get(digest)
        if kernel is not None:
            return kernel
        with self._guard:
            lock = self._locks.setdefault(digest, threading.Lock())
        with lock:
            kernel = self._memory.get(digest)
            if kernel is None:
                kernel = self._get_from_disk(digest, describe, compile_kernel)
                self._memory[digest] = kernel
        return kernel

    def peek(self, digest: str) -> T | None:
        """The kernel of `digest` when it is in memory or on disk, without compiling."""
        kernel = self._memory.get(digest)
        if kernel is None:
            folder = self._folder()
            kernel = self._read(folder / digest) if folder is not None else None
            if kernel is not None:
                self._memory[digest] = kernel
        return kernel

    def clear_memory(self) -> None:
        """Forget loaded kernels; the disk keeps them."""
        self._memory.clear()

    def _get_from_disk(self, digest: str, describe: Mapping[str, Any], compile_kernel: Callable[[], T]) -> T:
        folder = self._folder()
        if folder is None:
            return _count_compile(compile_kernel)
        entry = folder / digest
        kernel = self._read(entry)
        if kernel is not None:
            return kernel
        with _file_lock(folder / f"{digest}.lock") as locked:
            kernel = self._read(entry) if locked else None
            if kernel is None:
                kernel = _count_compile(compile_kernel)
                self._publish(entry, kernel, describe)
        return kernel

    def _folder(self) -> Path | None:
        """The private folder of entries, or None, with one warning, where there cannot be one."""
        if self._root is None:
            return None
        folder = self._root / "kernels"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = folder.stat()
        except OSError as error:
            _warn_disk(f"the kernel cache {folder} cannot be created ({error.strerror or error})")
            return None
        if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            _warn_disk(f"the kernel cache {folder} can be written by other users, and it holds machine code")
            return None
        return folder

    def _read(self, entry: Path) -> T | None:
        """Load a published entry; None when it is absent, corrupt or foreign."""
        try:
            meta = json.loads((entry / META).read_bytes())
            content = (entry / ARTEFACT).read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.info("cache entry %s is unreadable: %s", entry, error)
            return None
        if not isinstance(meta, dict) or meta.get("format") != _FORMAT or meta.get("digest") != entry.name:
            _log.info("cache entry %s is foreign", entry)
            return None
        if meta.get("sha256") != hashlib.sha256(content).hexdigest():
            _log.info("cache entry %s is corrupt", entry)
            return None
        try:
            kernel = self._load(entry / ARTEFACT)
        except Exception as error:
            _log.info("cache entry %s does not load: %s", entry, error)
            return None
        log.count("kernel_cache_hits")
        _log.debug("kernel %s loaded from disk", entry.name)
        return kernel

    def _publish(self, entry: Path, kernel: T, describe: Mapping[str, Any]) -> None:
        temporary = None
        try:
            temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
            self._save(kernel, temporary / ARTEFACT)
            content = (temporary / ARTEFACT).read_bytes()
            meta = {
                "format": _FORMAT, "digest": entry.name, "sha256": hashlib.sha256(content).hexdigest(),
                "size": len(content), "key": dict(describe),
            }  # fmt: skip
            (temporary / META).write_text(json.dumps(meta, indent=1, default=str))
            if entry.exists():
                shutil.rmtree(entry)
            os.replace(temporary, entry)
            temporary = None
        except Exception as error:
            _warn_disk(f"a kernel could not be kept in {entry.parent} ({type(error).__name__}: {error})")
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)


def _count_compile(compile_kernel: Callable[[], T]) -> T:
    kernel = compile_kernel()
    log.count("kernel_compiles")
    return kernel


def _warn_disk(cause: str) -> None:
    remedy = "Kernels are compiled again in each process; set FA4_INDUCTOR_CACHE_DIR to a private writable directory"
    log.warn_once(cause, remedy)


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[bool]:
    """Exclusive lock between processes; yields whether it was got (not on a read-only disk, or if its holder hangs)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _log.info("no lock %s: %s", path, error)
        yield False
        return
    try:
        yield _acquire(descriptor, time.monotonic() + _LOCK_TIMEOUT_S)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError as error:
            _log.info("file locks do not work here: %s", error)
            return False
