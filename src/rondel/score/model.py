"""A reward model: a classifier with one label reads the conversation, and its number at the last token is the reward.

It runs in the process of the reward, which alone imports torch; nothing is padded, so a
score cannot depend on who is beside it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rondel.core.errors import ConfigError, RewardError
from rondel.core.registry import one_of
from rondel.core.types import Failed, Score, Task, Trajectory, Turn
from rondel.score.answer_text import asked_of, question_text, turns_of
from rondel.score.batch import Batcher
from rondel.score.offload import OffloadedModel
from rondel.system.whole_checkpoint import load_pretrained
from rondel.text.tokenization import special_tokens
from rondel.text.unicode import valid_unicode

CLOSE = 1e-4  # a packed score and one computed alone, relative to the larger of it and 1; bfloat16 gets more


class RewardModel:
    """`RewardModel(path="folder or hub id")(trajectory, task)` -> Score of AutoModelForSequenceClassification
    with one label.

    tokens    of one batch, all its texts together
    template  of the text, with {question} and {answer}; None is the tokenizer's chat template
    device    "cpu", "cuda", "cuda:1", ...; threads is how many the CPU may use: the others are the engine's
    offload   while somebody else has the device its weights lie in host memory, and who asks waits: it
              begins asleep, `rise` and `wake` end that
    """

    auto = "AutoModelForSequenceClassification"

    def __init__(
        self,
        *,
        path: str,
        device: str = "cpu",
        dtype: str = "float32",
        tokens: int = 8192,
        template: str | None = None,
        threads: int = 1,
        together: int = 64,
        offload: bool = False,
    ) -> None:
        import torch
        import transformers

        one_of("reward model dtype", dtype, ("float32", "bfloat16", "float16"))
        if tokens < 1 or threads < 1 or together < 2:
            raise ConfigError(
                f"reward model: tokens = {tokens}, threads = {threads}, together = {together}; they are positive, "
                f"together above 1"
            )
        torch.set_num_threads(threads)
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            self.device = torch.device(device)
            how = {"pretrained_model_name_or_path": path, "dtype": getattr(torch, dtype)}
            self.model = load_pretrained(getattr(transformers, self.auto), path, **how).eval()
            if not offload:
                self.model.to(self.device)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"reward model {path!r} cannot be loaded as {self.auto}: {error}") from error
        self.torch, self.path, self.template, self.together = torch, path, template, together
        if template is None and not self.tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of reward model {path!r} has no chat template: set template = "
                f"'{{question}}\\n{{answer}}'"
            )
        if template is not None and "{answer}" not in template:
            raise ConfigError(f"reward model: template = {template!r} has no {{answer}}")
        self.body: Any = getattr(self.model, self.model.base_model_prefix, None)
        self.head = self._score_head()
        self.most = getattr(self.model.config, "max_position_embeddings", None) or 1 << 30
        self.special = special_tokens(self.tokenizer)
        self.counts: dict[str, float] = defaultdict(float)
        self.packs: bool | None = None
        self._thread, self._awake = ThreadPoolExecutor(1), asyncio.Event()
        self._batcher = Batcher(self._compute_values, most=together, size=len, room=tokens, lanes=1, door=self._awake)
        self._naps = OffloadedModel(self.model, self.device) if offload else None
        self.naps = offload
        if not offload:
            self.load_to_device()

    async def __call__(self, trajectory: Trajectory, task: Task) -> Score | Failed:
        ids = self.encode_conversation(asked_of(trajectory, task), turns_of(trajectory))
        if not 0 < len(ids) <= self.most:
            return Failed(
                "text does not fit the reward model", f"it has {len(ids)} tokens, and the model reads 1 to {self.most}"
            )
        return Score((await self._batcher(ids))[-1])

    # -- asleep and awake ----------------------------------------------------------------------------

    def load_to_device(self) -> None:
        """Before anybody can ask: its weights are on the device, and it scores."""
        self._wake_model()
        self._awake.set()

    async def wake(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._wake_model)
        self._awake.set()

    def _wake_model(self) -> None:
        if self._naps is not None:
            self._naps.wake()
        if self.packs is None:
            self.packs = self._can_pack()

    async def sleep(self) -> None:
        """The batch that is computed ends first; whoever waits is scored after it wakes,
        and the wait is not on his clock.
        """
        self._awake.clear()
        if self._naps is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._naps.sleep)

    @property
    def memory(self) -> int:
        """Bytes of its weights on the device, where it naps."""
        return self._naps.device_bytes if self._naps is not None else 0

    def encode_conversation(self, asked: list[dict[str, str]], turns: list[Turn]) -> list[int]:
        """The conversation as the model's own tokens. Special tokens that it spells are
        text: an answer cannot end itself.
        """
        messages = self.special.cover_messages(
            valid_unicode([*asked, *({"role": turn.role, "content": turn.text} for turn in turns)])
        )
        if self.template is not None:
            said = messages[len(asked) :]
            answer = said[0]["content"] if len(said) == 1 else "\n".join(f"{m['role']}: {m['content']}" for m in said)
            words = {"question": question_text(messages[: len(asked)]), "answer": answer}
            text = re.sub(r"\{(question|answer)\}", lambda found: words[found[1]], self.template)
            return self.special.encode(text, add_special_tokens=True)
        return self.special.encode(self._apply_chat_template(messages))

    def _apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        """As the model's chat template writes it. One that refuses a role reads those
        messages as the user's, with the role named.
        """
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template refuses by raising whatever it likes
            plain = [
                m if m["role"] in ("user", "assistant") else {"role": "user", "content": f"{m['role']}: {m['content']}"}
                for m in messages
            ]
            merged: list[dict[str, str]] = []
            for m in plain:
                if merged and merged[-1]["role"] == m["role"]:
                    merged[-1] = m | {"content": f"{merged[-1]['content']}\n{m['content']}"}
                else:
                    merged.append(m)
            if merged == messages:
                raise RewardError(
                    f"the chat template of reward model {self.path!r} refuses this conversation: {error}"
                ) from error
            return str(self.tokenizer.apply_chat_template(merged, tokenize=False))

    async def _compute_values(self, batch: list[list[int]]) -> list[list[float]]:
        began = time.monotonic()
        results = await asyncio.get_running_loop().run_in_executor(self._thread, self.token_values, batch)
        for name, value in {
            "texts": len(batch),
            "batches": 1,
            "tokens": sum(map(len, batch)),
            "seconds": time.monotonic() - began,
        }.items():
            self.counts[f"model_{name}"] += value
        return results

    def token_values(self, batch: list[list[int]]) -> list[list[float]]:
        """[each text][each token] what the head says after that token."""
        if not self.packs:
            return [self._forward_batch([ids])[0] for ids in batch]
        return self._forward_batch(batch)

    def _forward_batch(self, batch: list[list[int]]) -> list[list[float]]:
        """All texts in one row; positions begin anew with each, and by them attention keeps to its own text."""
        self._refuse_asleep()
        torch, device = self.torch, self.device
        row = torch.tensor([[i for ids in batch for i in ids]], device=device)
        places = torch.tensor([[at for ids in batch for at in range(len(ids))]], device=device)
        with torch.inference_mode():
            said_T = self.head(self.body(input_ids=row, position_ids=places, use_cache=False).last_hidden_state)[0]
        return [self.reward_values(said_NK).tolist() for said_NK in said_T.float().split([len(ids) for ids in batch])]

    def _refuse_asleep(self) -> None:
        if self._naps is not None and self._naps.asleep:
            raise RewardError("a reward model was asked while it slept: somebody else has its device")

    def reward_values(self, said_NK: Any) -> Any:
        return said_NK[:, 0]

    def _score_head(self) -> Any:
        head = getattr(self.model, "score", None)
        if self.model.config.num_labels != 1 or head is None or self.body is None:
            raise ConfigError(
                f"reward model {self.path!r} is a {type(self.model).__name__} with {self.model.config.num_labels} "
                f"labels; a decoder with one label is "
                "needed (config.num_labels = 1, a head called 'score')"
            )
        return head

    def _can_pack(self) -> bool:
        """Tried at the start: do texts in one row leave each other alone in this model? If not they go one by one."""
        size = min(self.model.config.get_text_config().vocab_size, 1000)
        probes = [[(7 * i + k) % size for i in range(n)] for k, n in ((1, 5), (2, 9), (3, 3))]
        alone, packed = [self._forward_batch([ids])[0] for ids in probes], self._forward_batch(probes)
        close = CLOSE if self.model.dtype == self.torch.float32 else 0.1
        pairs = [(x, y) for one, other in zip(alone, packed) for x, y in zip(one, other)]
        return all(abs(x - y) <= close * max(1.0, abs(x)) for x, y in pairs)
