"""The instances of a task service elsewhere: asked for in blocks, remembered, and compared.

Safe to use from several threads; a call blocks where it has to ask. What is measured is kept for
good, so that measuring needs no instance again. How the service is asked is somebody else's.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from headrace.tasks.remote.checking import Misreport, read_instances, read_seeds
from headrace.tasks.results import difference, shown
from headrace.tasks.serving.wire import InstancesRequest, NamedInstance, SeedsRequest
from headrace.tasks.types import TaskInstance

BLOCK = 8
"""Seeds whose instances are asked for together: some take tenths of a second to make."""
_KEPT = 16_384


class RemoteInstances:
    """The instances of one service.

    Args:
        task: whose they have to be.
        fetch: posts a body to a route and returns the answer's. What it raises is raised by every
            method here.
    """

    def __init__(self, task: str, fetch: Callable[[str, Any], bytes]) -> None:
        self._task = task
        self._fetch = fetch
        self._asking = threading.Lock()
        self._seeds: dict[str, OrderedDict[int, int]] = {
            "train": OrderedDict(),
            "evaluation": OrderedDict(),
        }
        self._named: OrderedDict[int, NamedInstance] = OrderedDict()
        self._pinned: dict[int, NamedInstance] = {}

    def seed(self, split: str, index: int) -> int:
        """The seed of a position of "train" or "evaluation"; its instance is known then, too.

        Raises:
            Misreport: the service says what cannot be (also from the methods below).
        """
        found = self._seeds[split].get(index)
        if found is None:
            first = index - index % BLOCK
            found = self._block(split, range(first, first + BLOCK))[index - first]
        return found

    def pin(self, split: str, count: int) -> None:
        """Ask for the first `count` positions and never forget their instances."""
        for start in range(0, count, BLOCK):
            for seed in self._block(split, range(start, min(start + BLOCK, count))):
                self._pinned[seed] = self.named(seed)

    def known(self, seed: int) -> NamedInstance | None:
        """The instance of a seed, if that was asked for."""
        return self._pinned.get(seed) or self._named.get(seed)

    def named(self, seed: int) -> NamedInstance:
        """The instance of a seed and what it asks."""
        found = self.known(seed)
        if found is None:
            with self._asking:
                found = self._ask([seed])[0]
        return found

    def content_id(self, instance: TaskInstance) -> str:
        """What an instance asks, as long as its seed still stands for it."""
        found = self.named(instance.seed)
        changed = difference(instance, found.instance)
        if changed is not None:
            raise Misreport(changed)
        return found.content_id

    def _block(self, split: str, positions: range) -> list[int]:
        """The seeds of some positions."""
        with self._asking:
            known = self._seeds[split]
            if not all(i in known for i in positions):
                request = SeedsRequest(
                    "train" if split == "train" else "evaluation", positions.start, len(positions)
                )
                seeds = read_seeds(self._fetch("/v1/seeds", request), len(positions))
                self._ask(seeds)
                known.update(zip(positions, seeds, strict=True))
                while len(known) > _KEPT:
                    known.popitem(last=False)
            return [known[i] for i in positions]

    def _ask(self, seeds: list[int]) -> list[NamedInstance]:
        data = self._fetch("/v1/instances", InstancesRequest(seeds))
        found = read_instances(data, self._task, seeds)
        for named in found:
            seed = named.instance.seed
            before = self.known(seed) or named
            changed = difference(before.instance, named.instance)
            if changed is None and before.content_id != named.content_id:
                changed = (
                    f"content_id of seed {seed} is {shown(named.content_id)}, it was "
                    f"{shown(before.content_id)}"
                )
            if changed is not None:
                raise Misreport(changed)
        self._named.update((named.instance.seed, named) for named in found)
        while len(self._named) > _KEPT:
            self._named.popitem(last=False)
        return found
