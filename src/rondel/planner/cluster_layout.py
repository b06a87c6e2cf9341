"""How a recipe fills the nodes of a cluster, and the command that starts it there.

nodes · gpus a node = ranks of the trainer + engines        place.engines of them are
engines, the others ranks, unless the recipe says
torchrun   the first node's last GPUs are the engines', since its first rank starts them
ray        a worker a GPU, on any node
gpus = 0   nodes without GPUs: the recipe says how many ranks
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rondel.core.config.job import Job
from rondel.core.errors import UserError

SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[\w-]{16,}|ghp_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b|://[^/\s:@]+:[^/\s@]+@"
)
SECRET_KEY = re.compile(r"(api_?key|auth_?token|access_?token|password|secret)\s*=\s*[\"']?[^\s\"'{}]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """How a recipe fills a cluster."""

    recipe: Path
    job: Job
    nodes: int
    gpus: int
    overrides: tuple[str, ...] = ()

    @property
    def engine_count(self) -> int:
        """Of this house: those of others are where their url says."""
        return self.job.place.engine_count if self.job.engine.kind == "builtin" else 0

    @property
    def engine_gpus(self) -> int:
        return self.engine_count * self.job.place.engine_processes

    @property
    def ranks(self) -> int:
        given = "ranks" in self.job.place.model_fields_set or self.job.place.mesh.shards != "auto"
        return self.job.place.ranks if given or not self.gpus else self.nodes * self.gpus - self.engine_gpus

    def ranks_of(self, node: int) -> int:
        """Ranks that torchrun starts on this one."""
        if self.gpus:
            return self.gpus - (self.engine_gpus if node == 0 else 0)
        return self.ranks // self.nodes

    @property
    def name(self) -> str:
        """Lower case, as Kubernetes wants it."""
        return (
            "".join(c if c.isalnum() and c.isascii() else "-" for c in self.recipe.stem.lower()).strip("-")[:40]
            or "run"
        )

    def check_layout(self, way: str) -> ClusterLayout:
        n = self.job.place.engine_processes
        each = f" of {n} GPUs" * (n > 1)
        here, all_of_them = f"{self.nodes} x {self.gpus} GPUs", self.nodes * self.gpus
        self._refuse_secrets()
        if not self.gpus and way == "torchrun" and self.ranks % self.nodes:
            raise UserError(
                f"nodes without GPUs share the ranks evenly: {self.ranks} ranks on {self.nodes} nodes do not, so set "
                f"place.ranks to a multiple of {self.nodes}"
            )
        if self.gpus and (self.ranks < 1 or self.ranks + self.engine_gpus > all_of_them):
            raise UserError(
                f"{self.ranks} ranks and {self.engine_count} engines{each} do not fit on {here}: ask for more "
                f"--nodes or --gpus, or set fewer "
                "place.engines and place.ranks"
            )
        if way != "torchrun" and n > 1:
            raise UserError(
                "engines of several processes are on the machine of the run, which Ray does not promise: use --with "
                f"torchrun, or place.engines = {self.engine_count}"
            )
        if way == "torchrun" and 0 < self.gpus <= self.engine_gpus:
            raise UserError(
                f"under torchrun the engines are on the first node, and {self.engine_gpus} of them leave no GPU of "
                f"{self.gpus} for its first rank: "
                "use --with ray, or fewer place.engines"
            )
        if self.gpus and way == "torchrun" and self.ranks + self.engine_gpus != all_of_them:
            raise UserError(
                f"torchrun fills every node: {here} are {all_of_them - self.engine_gpus} ranks beside "
                f"{self.engine_gpus} engines, and place.ranks = "
                f"{self.ranks}. Leave place.ranks out"
            )
        return self

    def train_command(self, recipe: str, cluster: str, *more: str) -> str:
        place = self.job.place
        engines = str(max(1, self.engine_count))
        if place.engine_processes > 1:
            experts = f", ep = {place.engine_tp * place.engine_dp}" if place.engine_experts_apart else ""
            engines = f"{{ count = {place.engine_count}, {place.engine_sizes}{experts} }}"
        ranks = [f"--place.ranks={self.ranks}"] if cluster != "torchrun" else []
        words = [
            "--place.kind=split",
            f"--place.cluster={cluster}",
            f"--place.engines={engines}",
            *ranks,
            *more,
        ]
        return shlex.join(["rondel", "train", recipe, *self.overrides, *words])

    def _refuse_secrets(self) -> None:
        """What a scheduler stores, others can read: scripts, manifests, the command of a job."""
        for text, where in [(word, word.partition("=")[0]) for word in self.overrides] + [
            (self.recipe.read_text(encoding="utf-8"), str(self.recipe))
        ]:
            if SECRET.search(text) or SECRET_KEY.search(text):
                raise UserError(
                    f"{where} holds what looks like a secret (a key, a token or a password), and the job's file can be "
                    "read by others: set it in the environment of the job instead (SLURM takes that of the shell that "
                    "submits, Kubernetes a Secret by --secret NAME)"
                )
