"""Which implementations of an op exist and which one a call gets.

Every op has one contract and several backends: "reference" is plain torch and runs everywhere,
"cpu" is fast on CPUs. A call takes the newest registered backend that supports its device and is
available; `use` or the environment variable HEADRACE_OPS asks for another one.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from headrace.errors import UserError

ENVIRONMENT_VARIABLE = "HEADRACE_OPS"
REFERENCE = "reference"
ANY_DEVICE = "any"


class OpFallbackWarning(RuntimeWarning):
    """A backend cannot be used here and a slower one takes its place."""


@dataclass(frozen=True)
class Backend:
    """One implementation of one op.

    Attributes:
        op: name of the op, e.g. "select_topk".
        name: name of the backend, e.g. "cpu".
        function: the implementation; the op's public function documents its arguments.
        devices: device types it takes, e.g. ("cpu",); (ANY_DEVICE,) for all.
        available: why it cannot be used on this machine, None when it can. May take seconds the
            first time, when it compiles something; asked once.
    """

    op: str
    name: str
    function: Callable[..., Any]
    devices: tuple[str, ...]
    available: Callable[[], str | None]

    def supports(self, device_type: str) -> bool:
        """Whether it takes tensors on such a device."""
        return ANY_DEVICE in self.devices or device_type in self.devices


class Registry:
    """Backends by op. Safe to use from several threads."""

    def __init__(self) -> None:
        self._backends: dict[str, dict[str, Backend]] = {}
        self._reasons: dict[tuple[str, str], str | None] = {}
        self._warned: set[tuple[str, str]] = set()
        self._resolved: dict[tuple[str, str, str | None], Callable[..., Any]] = {}
        self._lock = threading.RLock()
        self._wanted: ContextVar[str | None] = ContextVar("headrace_ops_backend", default=None)

    def register(
        self,
        op: str,
        backend: str,
        function: Callable[..., Any],
        *,
        devices: tuple[str, ...] = ("cpu",),
        available: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Add an implementation; later ones are preferred, "reference" always comes last.

        Raises:
            ValueError: the op has a backend of that name already.
        """
        with self._lock:
            known = self._backends.setdefault(op, {})
            if backend in known:
                raise ValueError(f'op "{op}" has a backend "{backend}" already')
            known[backend] = Backend(op, backend, function, devices, available)
            self._resolved.clear()

    def ops(self) -> list[str]:
        """Names of all ops."""
        return sorted(self._backends)

    def backends(self, op: str, device_type: str | None = None) -> list[Backend]:
        """Backends of `op` in order of preference, available or not.

        Args:
            device_type: only those that take such tensors; None is all.
        """
        with self._lock:
            known = list(reversed(self._backends.get(op, {}).values()))
        known.sort(key=lambda backend: backend.name == REFERENCE)
        return [b for b in known if device_type is None or b.supports(device_type)]

    def reason(self, backend: Backend) -> str | None:
        """Why `backend` cannot be used on this machine; None when it can."""
        key = (backend.op, backend.name)
        with self._lock:
            if key not in self._reasons:
                self._reasons[key] = backend.available()
            return self._reasons[key]

    def resolve(self, op: str, device_type: str) -> Callable[..., Any]:
        """The implementation a call on `device_type` gets.

        A backend that was asked for but does not implement this op here is passed over in silence;
        one that is unavailable causes one OpFallbackWarning per backend and reason.

        Raises:
            UserError: the backend asked for does not exist, or nothing implements the op.
        """
        wanted = self.wanted()
        # Small ops are called a hundred times per token: what was found once is found at once.
        found = self._resolved.get((op, device_type, wanted))
        if found is not None:
            return found
        with self._lock:
            candidates = self.backends(op, device_type)
            if wanted is not None:
                candidates.sort(key=lambda backend: backend.name != wanted)
            for backend in candidates:
                reason = self.reason(backend)
                if reason is None:
                    self._resolved[op, device_type, wanted] = backend.function
                    return backend.function
                self._warn(backend.name, reason)
        raise UserError(f'op "{op}": no backend works on device type "{device_type}"')

    def prepare(self, device_type: str) -> None:
        """Choose the backend of every op now: what has to be compiled is, before anybody waits."""
        for op in self.ops():
            if self.backends(op, device_type):
                self.resolve(op, device_type)

    def wanted(self) -> str | None:
        """The backend asked for by `use` or the environment, None when neither does."""
        wanted = self._wanted.get()
        if wanted is None:
            wanted = os.environ.get(ENVIRONMENT_VARIABLE) or None
            self._require_known(wanted, ENVIRONMENT_VARIABLE)
        return wanted

    @contextmanager
    def use(self, backend: str) -> Iterator[None]:
        """Prefer `backend` inside the with-statement, in this thread (or async task) only.

        Raises:
            UserError: no op has such a backend.
        """
        self._require_known(backend, "ops.use")
        token = self._wanted.set(backend)
        try:
            yield
        finally:
            self._wanted.reset(token)

    def _require_known(self, backend: str | None, source: str) -> None:
        if backend is None:
            return
        names = {name for known in self._backends.values() for name in known}
        if backend not in names:
            choices = ", ".join(f'"{name}"' for name in sorted(names))
            raise UserError(f'{source}: unknown op backend "{backend}"; use one of {choices}')

    def _warn(self, backend: str, reason: str) -> None:
        with self._lock:
            if (backend, reason) in self._warned:
                return
            self._warned.add((backend, reason))
        warnings.warn(
            f'op backend "{backend}" is unavailable, slower code takes its place: {reason}',
            OpFallbackWarning,
            stacklevel=4,
        )


REGISTRY = Registry()
"""The registry of the process."""

prepare = REGISTRY.prepare
register = REGISTRY.register
resolve = REGISTRY.resolve
use = REGISTRY.use
