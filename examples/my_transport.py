"""A transport of your own: `sync.kind = "my_transport:OneFile"`, with `place.kind = "split"`. It only moves bytes: the
transaction around it (pause, digests, commit, probe) stays Rondel's. Trainer, driver and engines make one each.
"""

import torch

from rondel.core.types import Manifest, Route


class OneFile:
    holds = "commit"  # the engines read it beside the weights that serve, and stand still only while they change over
    names = "checkpoint"  # tensors under their Hugging Face names

    def __init__(self, folder):  # that of the run's weights
        self.file = folder / "newest.pt"

    async def plan_route(self, trainer, engines):
        return Route("my_transport:OneFile")  # the sync.kind of the recipe

    def publish(self, route, version, weights):
        self.file.parent.mkdir(parents=True, exist_ok=True)
        rows, tensors = zip(*((row, (row.name, tensor.detach().cpu().clone())) for row, tensor in weights))
        torch.save(dict(tensors), self.file)
        return Manifest(version, rows), Route(route.kind, str(self.file), bytes=self.file.stat().st_size)

    def receive(self, route, manifest, mine):
        yield from torch.load(route.data).items()

    def send(self, route, weights): ...  # nothing: the engines read the file
    def close(self): ...  # nothing is open between versions
