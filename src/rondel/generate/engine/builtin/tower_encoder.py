"""The vision tower of a model, alone in a process: it encodes pictures, and takes new weights.

encode   picture ──tower──> features, written into memory that the engine maps
stage    tensors that have changed ──> beside those that serve
commit   from here on pictures are encoded with them; who still waits for features of the old ones gets none
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rondel.core.errors import SyncError
from rondel.generate.engine.builtin.shared_tensors import SharedTensors
from rondel.generate.engine.builtin.weight_receiver import StagedWeights
from rondel.models import names, vision
from rondel.models.image_features import ImageFeatures, feature_shapes, feature_tensors, feature_widths
from rondel.models.main_grad import weights_changed

if TYPE_CHECKING:
    from rondel.core.media import Image
    from rondel.models.loaded_model import LoadedModel
    from rondel.models.names import TensorShape


class TowerEncoder:
    """
    updates  of the weights, since it was made
    widths   (width, dtype) of the features of one cell: for the embeddings, then for each layer that reads more
    digests  of the tower's tensors, by the model's names
    """

    def __init__(self, loaded: LoadedModel, device: str) -> None:
        assert loaded.sight is not None, f"'{loaded.name}' reads text alone"
        self.model, self.sight, self.updates = loaded.model, loaded.sight, 0
        vision.keep_tower(self.model)
        self.model.to(device)
        self._staged = StagedWeights(self.model)
        self._began: dict[str, str] = {}  # digests of what is staged
        self.digests = {name: names.tensor_digest(t) for name, t in vision.tower_tensors(self.model).items()}
        self.widths = feature_widths(self._look([vision.checkered_image(self.sight)]))

    @torch.inference_mode()
    def _look(self, images: list[Image]) -> ImageFeatures:
        return vision.encode_images(self.model, self.sight, images)

    def encode(self, image: Image, path: str, updates: int) -> bool:
        """Features of one picture into the memory at `path`. -> False, and nothing is written, where the weights are no
        longer those after so many updates.
        """
        if updates != self.updates:
            return False
        features, memory = (
            feature_tensors(self._look([image])),
            SharedTensors(feature_shapes(self.widths, image.tokens), path),
        )
        for name, place in memory.map_memory()[1].items():
            place.copy_(features[name])
        memory.close()
        return True

    def stage(self, shapes: dict[str, TensorShape], digests: dict[str, str], path: str) -> None:
        """New tensors, beside those that serve. SyncError if they have other bits than their digests say."""
        self.drop()
        memory = SharedTensors(shapes, path)
        staged = memory.read_tensors()
        memory.close()
        if wrong := [name for name, t in staged.items() if names.tensor_digest(t) != digests[name]]:
            raise SyncError(
                f"{len(wrong)} tensors came to the encoder with other bits than were sent, first {wrong[0]}"
            )
        device = next(iter(vision.tower_tensors(self.model).values())).device
        self._staged.tensors = {name: t.to(device) for name, t in staged.items()}
        self._began = digests

    def check_staged(self, digests: dict[str, str]) -> None:
        """SyncError unless exactly these are staged, if there are any."""
        if digests and self._began != digests:
            raise SyncError(f"the encoder holds {len(self._began)} new tensors, and {len(digests)} are committed")

    def commit(self, digests: dict[str, str]) -> None:
        """What is staged serves from now on, if it is what these are the digests of."""
        if digests:
            self._staged.swap_in()
            self.digests |= digests
        self.drop()
        weights_changed()

    def drop(self) -> None:
        """Forget what is staged."""
        self._staged, self._began = StagedWeights(self.model), {}
